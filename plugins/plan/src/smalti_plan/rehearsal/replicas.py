"""DistributedDataParallel without its reducer, which needs memory that has values: what it allocates and sends is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_LARGEST = 25 << 20
"""Bytes of a bucket, torch's default."""


class ModelledReplicas(DistributedDataParallel):
    """Gradients are views of buckets that exist from the beginning; they are copied there as soon as they are complete.

    That is what `gradient_as_bucket_view` does. Each bucket is reduced once a step, in the last micro-batch.
    """

    counting: Callable[[], AbstractContextManager[None]]
    """Within it, what is allocated counts as gradients."""

    def __init__(self, module: nn.Module, *_: object, **__: object) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with type(self).counting():
            self.gradients = {id(parameter): torch.empty_like(parameter) for parameter in trained}
        self.buckets = bucket_sizes(each.nbytes for each in self.gradients.values())
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def _complete(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync and parameter.grad is not None:
            own = self.gradients[id(parameter)]
            own.copy_(parameter.grad)
            parameter.grad = own


def bucket_sizes(sizes: Iterable[int]) -> list[int]:
    """Bytes of each bucket of gradients."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] and buckets[-1] + size > _LARGEST:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def install(counting: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on modules are replicated by `ModelledReplicas`. For the rest of the process."""
    parallel: Any = torch.nn.parallel
    ModelledReplicas.counting = staticmethod(counting)
    parallel.DistributedDataParallel = ModelledReplicas


def replicas_in(model: nn.Module) -> ModelledReplicas | None:
    return model if isinstance(model, ModelledReplicas) else None


def hook_gradients(model: nn.Module, marked: Callable[[Tensor], None]) -> None:
    """Call `marked` with each gradient as soon as the backward pass has added to it."""

    def look(parameter: Tensor) -> None:
        if parameter.grad is not None:
            marked(parameter.grad)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
