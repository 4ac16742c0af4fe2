"""The strategy without a plugin: one process, or a replica of the model on each rank; Accelerate's process group and DDP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from smalti.config import Config
from smalti.models import Weights, compile_blocks, materialise
from smalti.parallel import ReplicatedParallel
from smalti.types import Block


class DdpParallel(ReplicatedParallel):
    """Gradients are averaged over ranks during the backward pass of the last micro-batch of a step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._accelerator = Accelerator(
            cpu=self.world.device == "cpu",
            mixed_precision="no",  # precision is set around the forward pass, not patched into the model
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )

    def wrap(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with weights, on this rank's device, compiled block by block if the options say so, in DDP."""
        model = self.with_weights(model, blocks, weights)
        compile_blocks(model, blocks, self.config)
        return _with_final_buckets(cast(nn.Module, self._accelerator.prepare_model(model, device_placement=False)))

    def with_weights(self, model: nn.Module, blocks: Sequence[Block], weights: Weights) -> nn.Module:
        """The model with its first weights; what it computes with is on this rank's device, or comes there in time."""
        return materialise(model, weights, self.world.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._accelerator.no_sync(self.model)

    def close(self) -> None:
        super().close()
        self._accelerator.free_memory()


def _with_final_buckets(model: nn.Module) -> nn.Module:
    """Sum zeros once and let DDP rebuild its buckets of gradients now, so that the first step sums in the order of all others.

    Left to itself, DDP rebuilds them after the first step of each launch, and over three ranks or more a resumed run rounds
    differently. Where torch has no such internals, only that is lost.
    """
    reducer: Any = getattr(model, "reducer", None)
    if not all(hasattr(reducer, name) for name in ("prepare_for_backward", "_rebuild_buckets")):
        return model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reducer.prepare_for_backward([])
    torch.stack([parameter.sum().float() * 0 for parameter in trained]).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in trained:
        parameter.grad = None
    reducer._rebuild_buckets()
    return model
