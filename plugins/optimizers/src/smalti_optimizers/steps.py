"""What a step of an optimizer needs of its parameters, which may be sharded, and of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def with_gradients(group: dict[str, object]) -> list[Tensor]:
    """The parameters of a group that have a gradient in this step."""
    parameters: list[Tensor] = group["params"]  # type: ignore[assignment]
    return [parameter for parameter in parameters if parameter.grad is not None]


def stepped(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    """The parameters of all groups that have a gradient in this step, each with its group."""
    return [(parameter, group) for group in optimizer.param_groups for parameter in with_gradients(group)]


def sum_together(parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts of sums of each parameter, (n,) each, as the sums: one buffer for all. *Collective*."""
    if not parts:
        return []
    sums = sum_over_shards(torch.cat(list(parts)), parameters[0])
    return list(torch.split(sums, [len(part) for part in parts]))


def sum_over_shards(values: Tensor, parameter: Tensor) -> Tensor:
    """Sums of this rank's parts, (n,), as sums of the parameters, which are sharded like `parameter`. *Collective*."""
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(values, group=parameter.device_mesh.get_group(number))
    return values


def sharded_like(parameter: DTensor, part: Tensor, shape: torch.Size) -> DTensor:
    """A tensor of this shape, sharded like a parameter, of which a rank has `part`. It is where the rank's parameter is.

    `DTensor.from_local` and `distribute_tensor` move their results to the devices of the mesh, and offloaded shards are in host
    memory.
    """
    described = torch.empty(shape, device="meta")
    mesh, placements, own = parameter.device_mesh, parameter.placements, part.to(parameter.to_local().device)
    made = DTensor.from_local(own.to("meta"), mesh, placements, run_check=False, shape=shape, stride=described.stride())
    return DTensor(own, made._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def redistributed(whole: Tensor, parameter: DTensor) -> DTensor:
    """A plain tensor sharded like a parameter. Every rank has all of it, as a checkpoint is read."""
    sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return sharded_like(parameter, sharded.to_local(), whole.shape)


def own_ratio(group: Mapping[str, Any]) -> float:
    """What the learning rate of the run is multiplied by for this group.

    A step of Adam has the size of its rate, so a ratio r is another unit of the weights: as if weight / r were trained, whose
    gradient is r times as large, at the rate of the run.
    """
    return float(group.get("rate_ratio", 1.0))


def count_step(state: dict[str, Tensor]) -> int:
    """Count a step in `state["step"]`, a scalar in host memory; returns the number of steps with this one."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    state["step"] += 1
    return int(state["step"])
