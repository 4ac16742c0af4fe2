"""Cutting a model into shards: the mesh of ranks, the precision, and `fully_shard` on every group and on the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from smalti import UserError, World
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.wrapping import Unit, modules

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard_mesh(world: World, shard_size: int | None, *, offload: bool = False, timeout: timedelta | None = None) -> DeviceMesh:
    """A one-dimensional mesh of all ranks; two-dimensional if several groups of ranks each shard one copy of the model (HSDP).

    Without a size, each node shards one copy: gathering uses its fast links, and only gradients travel between nodes.
    If each node has a single rank, all nodes shard one copy, because a single rank would shard nothing.

    In two dimensions, groups are for accelerator tensors alone, unless gradients are in host memory (`offload`): that spares
    gloo's connections, one to every other rank of a group. Their collective calls have this `timeout`; torch gives new groups
    its default, not that of the group of all ranks.
    """
    size = shard_size or (world.local_size if world.local_size > 1 else world.size)
    kind = torch.device(world.device).type
    if world.size % size:
        raise UserError(
            f"{world.size} ranks cannot be split into groups of {size}", fix="--fsdp_shard_size=N that divides the ranks"
        )
    if size == world.size:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    backends: Any = None
    if kind != "cpu" and not offload:
        backends = dict.fromkeys(names, dist.get_default_backend_for_device(kind))
    mesh = init_device_mesh(kind, (world.size // size, size), mesh_dim_names=names, backend_override=backends)
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
    return mesh


def precision(options: FsdpOptions, *, bf16: bool) -> MixedPrecisionPolicy:
    """Parameters are gathered in bf16 in a bf16 run, gradients are averaged in fp32.

    Inputs are left as they are: autocast casts them where it is safe, so that timesteps and positions keep their precision.
    """
    chosen = {"auto": torch.bfloat16 if bf16 else None, **_DTYPES}
    return MixedPrecisionPolicy(
        param_dtype=chosen[options.fsdp_param_dtype],
        reduce_dtype=_DTYPES.get(options.fsdp_reduce_dtype, torch.float32),
        output_dtype=_DTYPES.get(options.fsdp_output_dtype),
        cast_forward_inputs=False,
    )


def shard(model: nn.Module, chosen: Sequence[Unit], mesh: DeviceMesh, options: FsdpOptions, *, bf16: bool) -> None:
    """Turn the parameters of a model, which may be on the meta device, into DTensors over `mesh`. *Collective*."""
    policy = precision(options, bf16=bf16)
    on_cpu = mesh.device_type == "cpu"
    offload = CPUOffloadPolicy(pin_memory=False) if options.fsdp_cpu_offload and not on_cpu else OffloadPolicy()
    for unit, module in modules(model, chosen):
        fully_shard(module, mesh=mesh, reshard_after_forward=unit.reshard, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def use_symmetric_memory(model: nn.Module) -> None:
    """Let a sharded model send its messages from symmetric memory of NCCL, gradients as sums. *Collective*.

    Raises UserError where torch has no such memory.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_force_sum_reduction_for_comms(True)  # others are not reduced so
        try:
            module.set_symm_mem_for_comm("NCCL")
        except (RuntimeError, ValueError, AttributeError) as error:
            message = f"torch cannot allocate symmetric memory of NCCL here: {error}"
            raise UserError(
                message, fix="--no_fsdp_symmetric_memory, or NVIDIA GPUs and a torch that is built with NCCL"
            ) from error


def prefetch(groups: Sequence[nn.Module], ahead: int, behind: int) -> None:
    """While one group computes, the next ones are gathered: in the order of the forward pass, and back.

    What is gathered ahead and not used waits for the next pass; a backward pass lets go of it.
    """
    for place, group in enumerate(groups):
        assert isinstance(group, FSDPModule)
        group.set_modules_to_forward_prefetch(_sharded(groups[place + 1 : place + 1 + ahead]))
        group.set_modules_to_backward_prefetch(_sharded(groups[max(0, place - behind) : place][::-1]))


def learn_order(model: nn.Module, groups: Sequence[nn.Module], learned: Callable[[list[nn.Module]], object]) -> None:
    """Call `learned` once, after the next forward pass, with the groups in the order in which it entered them.

    A model may list them in another. The order is that of all ranks, which gather together.
    """
    entered: dict[nn.Module, None] = {}

    def end(*unused: object) -> None:
        for hook in hooks:
            hook.remove()
        learned([*entered, *(group for group in groups if group not in entered)])

    hooks = [group.register_forward_pre_hook(lambda module, _: entered.setdefault(module)) for group in groups]
    hooks.append(model.register_forward_hook(end))


def _sharded(groups: Sequence[nn.Module]) -> list[FSDPModule]:
    return [group for group in groups if isinstance(group, FSDPModule)]
