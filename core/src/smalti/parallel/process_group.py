"""Base classes of strategies: everything in a `Parallel` that does not depend on how the model is distributed.

On accelerators the process group has two backends, the accelerator's own (NCCL) for tensors there and gloo for tensors in host
memory; on the CPU it has gloo only. A `Communicator` always uses gloo, so that it never waits for a kernel.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config import Config, LaunchOptions
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.precision import in_bf16
from smalti.parallel.protocol import AbortableCommunicator, Communicator, TrainingState
from smalti.parallel.state import ModelState
from smalti.types import World

if TYPE_CHECKING:
    from smalti.parallel.late_ranks import Presence, Thread

_closed: list[dist.ProcessGroup | None] = []
"""Groups that are no longer used, kept for as long as the process lives.

DDP's reducer would otherwise hold the last reference to one. It destroys the group while it holds the GIL, and waits for gloo's
threads, one of which may wait for the GIL to release a tensor (torch 2.13, pytorch/pytorch#56297).
"""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares memory with it; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ProcessGroupParallel(ABC):
    """Joins the process group that the launcher's environment describes, and trains with an ordinary torch optimizer.

    A strategy adds `accumulate` and `clip_gradients`; `unwrap` if it wraps the model in a module of its own; and
    `training_state` if weights or optimizer state are not the tensors of `model.parameters()` and of the optimizer.

    `context` is the number of neighbouring ranks that work on the same samples. `single` makes a process group for a single
    process as well.
    """

    model: nn.Module
    """Model and optimizer that `setup` has returned."""
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    """The parameters of `model` that train."""

    def __init__(self, config: Config, *, context: int = 1, single: bool = False) -> None:
        launch = config[LaunchOptions]
        self.config = config
        self.bf16 = in_bf16(config)
        """Whether forward passes compute in bf16."""
        self.timeout = timedelta(seconds=launch.process_group_timeout)
        self.world = _world(os.environ, cpu=launch.use_cpu, context=context)
        if not dist.is_initialized() and (self.world.size > 1 or single):
            _join(self.world, self.timeout)
        gloo_only = dist.is_initialized() and dist.get_backend() == "gloo"
        self._presences: list[Presence] = []
        messages = GlooCommunicator(world=self.world, group=dist.group.WORLD) if gloo_only else self._new_communicator()
        self._messages = self._patient(messages, "training")

    # --- communicator -----------------------------------------------------------------------------------------------

    def all_reduce_max(self, code: int) -> int:
        return self._messages.all_reduce_max(code)

    def all_gather_text(self, value: str) -> Sequence[str]:
        return self._messages.all_gather_text(value)

    def barrier(self) -> None:
        self._messages.barrier()

    def background_communicator(self) -> AbortableCommunicator:
        return self._patient(self._new_communicator(), "saving")

    def local_communicator(self) -> Communicator | None:
        """None: no rank holds the whole state."""
        return None

    def _new_communicator(self) -> GlooCommunicator:
        several = self.world.size > 1
        group = dist.new_group(backend="gloo", timeout=self.timeout) if several else None
        return GlooCommunicator(world=self.world, group=group)

    def _patient(self, communicator: GlooCommunicator, thread: Thread) -> GlooCommunicator:
        """The same, but its calls, which this thread makes, wait for ranks that work."""
        if self.world.size == 1:
            return communicator
        from smalti.parallel.late_ranks import Presence

        presence = Presence(self.world.rank, self.world.size, self.timeout.total_seconds(), thread)
        presence.start()
        self._presences.append(presence)
        return replace(communicator, presence=presence)

    # --- model and optimizer ----------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.model, self.optimizer = model, optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.state = self.training_state(self.unwrap(model), optimizer)
        return model, optimizer

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        """The state of the unwrapped model and its optimizer; called once, by `setup`."""
        return ModelState(model, optimizer)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    # --- steps ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def accumulate(self, last: bool) -> AbstractContextManager[None]: ...

    @abstractmethod
    def clip_gradients(self, limit: float) -> Tensor: ...

    @torch.no_grad()
    def clip_gradient_values(self, limit: float) -> Tensor:
        """For gradients that are in `parameter.grad`, whole or sharded: each rank clamps its part."""
        norm = self.clip_gradients(0.0)
        gradients = [local_part(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if limit > 0 and gradients:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
        return norm

    def autocast(self) -> AbstractContextManager[None]:
        if not self.bf16:
            return nullcontext()
        return torch.autocast(torch.device(self.world.device).type, dtype=torch.bfloat16)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def mean(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world.size

    def gather(self, value: Tensor) -> Sequence[Tensor]:
        if self.world.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.world.size)]
        dist.all_gather(found, value.contiguous())
        return found

    def close(self) -> None:
        """Leave together with the others: a rank that disappears while another still sends to it aborts that one."""
        for presence in self._presences:
            presence.close()
        if dist.is_initialized():
            _closed.append(dist.group.WORLD)
            dist.destroy_process_group()


class ReplicatedParallel(ProcessGroupParallel):
    """Every rank holds the whole model. A strategy adds `accumulate`, in which it averages the gradients over ranks."""

    def local_communicator(self) -> Communicator:
        return GlooCommunicator(world=World(device=self.world.device), group=None)

    def clip_gradients(self, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, limit if limit > 0 else float("inf"))


def _world(environment: Mapping[str, str], *, cpu: bool, context: int) -> World:
    """This rank's place, as torch's launcher and Accelerate's tell it; rank 0 of 1 where nobody launched it."""
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    accelerator = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    device = "cpu"
    if accelerator is not None:
        torch.accelerator.set_device_index(local_rank)
        device = f"{accelerator.type}:{local_rank}"
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=rank // local_size,
        device=device,
        context=context,
    )


def _join(world: World, timeout: timedelta) -> None:
    kind = torch.device(world.device).type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if world.size > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
