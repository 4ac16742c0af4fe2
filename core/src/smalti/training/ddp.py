"""`Parallel` for one process and for replicas of the model on several: Accelerate's process group and DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from smalti.config import Config
from smalti.models import Weights, compile_blocks, materialise
from smalti.parallel import Communicator, GlooCommunicator, PortableState, ProcessGroupParallel, capture, in_bf16, restore
from smalti.types import Block, World


class DdpParallel(ProcessGroupParallel):
    """Every rank holds the whole model; gradients are averaged in the last micro-batch of a step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._bf16 = in_bf16(config)
        self._accelerator = Accelerator(
            cpu=self.world.device == "cpu",
            mixed_precision="no",  # precision is set around the forward pass, not patched into the model
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with weights, on this rank's device, compiled block by block if asked for, replicated."""
        model = materialise(model, weights, self.world.device)
        compile_blocks(model, blocks, self._config)
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
        return _bf16(self.world.device) if self._bf16 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, limit if limit > 0 else float("inf"))

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def discard(self) -> None:
        self._optimizer.zero_grad()

    def local_communicator(self) -> Communicator:
        return GlooCommunicator(world=World(device=self.world.device), group=None)

    def portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PortableState:
        return capture(self.unwrap(model), optimizer)

    def load_portable_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: PortableState) -> None:
        restore(self.unwrap(model), optimizer, state)

    def close(self) -> None:
        super().close()
        self._accelerator.free_memory()


@contextmanager
def _bf16(device: str) -> Iterator[None]:
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        yield
