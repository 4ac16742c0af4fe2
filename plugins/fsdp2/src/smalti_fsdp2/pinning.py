"""Shards in host memory: those of one group in one piece of pinned memory of exactly their size.

torch pins tensor by tensor and rounds each up to a power of two, half as much again for the weights of a large model, and so it
does with gradients, unless its allocator is configured otherwise.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smalti.checkpoint import Arena

_log = logging.getLogger(__name__)
_EXACT = "pinned_max_round_threshold_mb"
"""The setting of torch's allocator for sizes, in MiB, from which on it does not round them up."""


@torch.no_grad()
def pin_shards(model: nn.Module, kind: str, limit: int) -> None:
    """Move the shards of a model to pinned memory, for copies to this kind of device; they have no values after it.

    Groups beyond `limit` bytes stay in ordinary memory, and memory that the system refuses to pin is used as it is. So are the
    shards where torch has no such internals.
    """
    left = 0
    for group in (group for module in model.modules() for group in groups_of(module)):
        size = sum(each._sharded_param_data.nbytes for each in group.fsdp_params)
        if size > limit:
            left += size
            continue
        limit -= size
        _pin(group.fsdp_params, kind)
    if left:
        _log.warning("%.1f GiB of shards in host memory are not pinned, and are copied more slowly: --pinned_gib", left / 2**30)


def pin_gradients_exactly() -> None:
    """Make torch's own pinned memory, to which gradients are copied, as large as they are; only below a MiB it is rounded up.

    For the rest of the process. Nothing changes where the settings of the allocator say it, or torch has no such setting.
    """
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return
    settings = torch._C._accelerator_getAllocatorSettings()
    if _EXACT in settings:
        return
    try:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"{_EXACT}:1"))))
    except (RuntimeError, ValueError) as error:
        _log.debug("torch rounds pinned memory up to powers of two: %s", error)


def groups_of(module: nn.Module) -> list[Any]:
    """torch's records of the groups of parameters that a module gathers, without those of modules within it."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def _pin(parameters: list[Any], kind: str) -> None:
    """`parameters` are torch's records of the parameters of one group, whose shards are in ordinary memory."""
    arena = Arena([each._sharded_param_data.nbytes for each in parameters], kind)
    for each in parameters:
        move(each, arena.take(each._sharded_param_data.shape, each._sharded_param_data.dtype))


def move(parameter: Any, memory: torch.Tensor) -> None:
    """Make `memory` the shard of one parameter, flat and padded. It has no values after it."""
    memory.zero_()  # the padding is gathered too
    local, dimension = parameter.sharded_param._local_tensor, parameter.fsdp_placement.dim
    length = local.size(dimension) if local.numel() else 0
    parameter._sharded_param_data = memory
    parameter.sharded_param._local_tensor = memory.view(parameter.padded_sharded_param_size).narrow(dimension, 0, length)
    parameter.pin_memory = memory.is_pinned()  # gradients are copied to pinned memory then, without waiting
