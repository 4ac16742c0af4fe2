"""What optimizers need of sharded parameters: this rank's parts, sums over all parts, and work in pieces of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_PIECE_BYTES = 64 * 2**20
"""Bytes of tensors that are worked on together, as long as single ones are not larger."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares memory with it; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local_part` of each."""
    return [local_part(tensor) for tensor in tensors]


def with_gradients(group: dict[str, object]) -> list[Tensor]:
    """The parameters of a group that have a gradient in this step."""
    parameters: list[Tensor] = group["params"]  # type: ignore[assignment]
    return [parameter for parameter in parameters if parameter.grad is not None]


def sum_over_shards(values: Tensor, parameter: Tensor) -> Tensor:
    """Sums of this rank's parts, (n,), as sums of the parameters, which are sharded like `parameter`. *Collective*."""
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(values, group=parameter.device_mesh.get_group(number))
    return values


def grouped(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of neighbours, of these sizes in bytes, that fit into one piece together; or of one that is larger."""
    group: list[int] = []
    taken = 0
    for index, size in enumerate(sizes):
        if group and taken + size > _PIECE_BYTES:
            yield group
            group, taken = [], 0
        group.append(index)
        taken += size
    if group:
        yield group


def count_step(state: dict[str, Tensor]) -> int:
    """Count a step in `state["step"]`, a scalar in host memory; returns the number of steps with this one."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    state["step"] += 1
    return int(state["step"])
