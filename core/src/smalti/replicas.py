"""`Parallel` for one process and for replicas of the model on several: Accelerate's process group and DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn

from smalti.checkpoint.portable import capture, restore
from smalti.config import Config
from smalti.models.family import Weights
from smalti.models.weights import materialise
from smalti.parallel import Line, PortableState, Ranks
from smalti.ranks import GlooRanks
from smalti.settings import LaunchOptions, TrainingOptions
from smalti.types import Block, World


class Replicas:
    """Every rank holds the whole model; gradients are averaged in the last micro-batch of a step."""

    def __init__(self, config: Config) -> None:
        launch = config[LaunchOptions]
        self._bf16 = config[TrainingOptions].mixed_precision == "bf16"
        self._compile = (launch.dynamo_backend, launch.dynamo_mode)
        self._accelerator = Accelerator(
            cpu=launch.use_cpu or torch.accelerator.current_accelerator(check_available=True) is None,
            mixed_precision="no",  # precision is set around the forward pass, not patched into the model
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(seconds=launch.process_group_timeout)),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
        state = self._accelerator.state
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._world = World(
            rank=state.process_index,
            size=state.num_processes,
            local_rank=state.local_process_index,
            local_size=local_size,
            node=state.process_index // local_size,
            device="cpu" if state.device.type == "cpu" else str(state.device),
        )
        self._timeout = timedelta(seconds=launch.process_group_timeout)
        own = self._world.size > 1 and dist.get_backend() == "gloo"
        self._control = GlooRanks(world=self._world, group=dist.group.WORLD) if own else self.side_channel()

    @property
    def world(self) -> World:
        return self._world

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with weights, on this rank's device, compiled block by block if asked for, replicated."""
        model = materialise(model, weights, self._world.device)
        backend, mode = self._compile
        if backend is not None:
            for block in blocks:
                model.get_submodule(block.path).compile(backend=backend.lower(), mode=mode)
        return cast(nn.Module, self._accelerator.prepare_model(model))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._model, self._optimizer = model, optimizer
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, optimizer

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._accelerator.no_sync(self._model)

    def autocast(self) -> AbstractContextManager[None]:
        return _bf16(self._world.device) if self._bf16 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, limit if limit > 0 else float("inf"))

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def discard(self) -> None:
        self._optimizer.zero_grad()

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

    def agree(self, code: int) -> int:
        return self._control.agree(code)

    def share(self, value: str) -> Sequence[str]:
        return self._control.share(value)

    def barrier(self) -> None:
        self._control.barrier()

    def alone(self) -> Ranks:
        return GlooRanks(world=World(device=self._world.device), group=None)

    def side_channel(self) -> Line:
        several = self._world.size > 1
        return GlooRanks(world=self._world, group=dist.new_group(backend="gloo", timeout=self._timeout) if several else None)

    def portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        return capture(self.unwrap(model), optimizer)

    def load_portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
        restore(self.unwrap(model), optimizer, state)

    def close(self) -> None:
        """Leave in step with the others: a rank that disappears while another still talks to it aborts that one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._accelerator.free_memory()


@contextmanager
def _bf16(device: str) -> Iterator[None]:
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        yield
