"""The base class of strategies: everything in a `Parallel` that does not depend on how the model is distributed.

On accelerators the process group has two backends, the accelerator's own (NCCL) for tensors there and gloo for tensors in host
memory; on the CPU it has gloo only. A `Communicator` always uses gloo, so that it never waits for a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.config import Config, LaunchOptions
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.protocol import AbortableCommunicator, Communicator, Parallel, PortableState
from smalti.parallel.state import named_parameters
from smalti.types import World

_left: list[dist.ProcessGroup | None] = []
"""Groups of which no more is asked, kept for as long as the process lives.

DDP's reducer would otherwise be the last to hold one. It takes the group down with Python's lock in its hands, and waits for
gloo's threads, one of which may wait for that lock to let go of a tensor (torch 2.13, pytorch/pytorch#56297).
"""


class ProcessGroupParallel:
    """Joins the process group that the launcher's environment describes.

    `context` is the number of neighbouring ranks that work on the same samples. `alone_too` makes a group of one for a single
    process as well, for backends that cannot do without.
    """

    def __init__(self, config: Config, *, context: int = 1, alone_too: bool = False) -> None:
        launch = config[LaunchOptions]
        self._timeout = timedelta(seconds=launch.process_group_timeout)
        self._world = _world(os.environ, cpu=launch.use_cpu, context=context)
        if not dist.is_initialized() and (self._world.size > 1 or alone_too):
            _join(self._world, self._timeout)
        own = dist.is_initialized() and dist.get_backend() == "gloo"
        self._control = GlooCommunicator(world=self._world, group=dist.group.WORLD) if own else self.background_communicator()

    @property
    def world(self) -> World:
        return self._world

    def all_reduce_max(self, code: int) -> int:
        return self._control.all_reduce_max(code)

    def all_gather_text(self, value: str) -> Sequence[str]:
        return self._control.all_gather_text(value)

    def barrier(self) -> None:
        self._control.barrier()

    def background_communicator(self) -> AbortableCommunicator:
        several = self._world.size > 1
        return GlooCommunicator(
            world=self._world, group=dist.new_group(backend="gloo", timeout=self._timeout) if several else None
        )

    def local_communicator(self) -> Communicator | None:
        """No rank holds the whole state unless the backend says so."""
        return None

    def mean(self, value: Tensor) -> Tensor:
        if self._world.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self._world.size

    def gather(self, value: Tensor) -> Sequence[Tensor]:
        if self._world.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self._world.size)]
        dist.all_gather(found, value.contiguous())
        return found

    def refresh(self, model: nn.Module) -> None:
        """Nothing is derived from the weights unless the backend says so."""

    def masters(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters themselves, unless the backend keeps their weights elsewhere."""
        return {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}

    def portable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """They are portable as they are unless the backend says otherwise."""
        return dict(tensors)

    def blank(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `portable` gives, unless the backend has something that is made with less."""
        return cast(Parallel, self).portable(tensors)

    def blank_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        """What `portable_state` gives, unless the backend has something that is made with less."""
        return cast(Parallel, self).portable_state(model, optimizer)

    @torch.no_grad()
    def put_back(self, portable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor is not portable[name]:
                tensor.copy_(portable[name])

    def close(self) -> None:
        """Leave in step with the others: a rank that disappears while another still talks to it aborts that one."""
        if dist.is_initialized():
            _left.append(dist.group.WORLD)
            dist.destroy_process_group()


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
