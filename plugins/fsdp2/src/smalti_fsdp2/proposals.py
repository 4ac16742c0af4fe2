"""What FSDP2 takes on each rank, for `smalti plan`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from smalti import Communication, Config, Recompute, Strategy, World
from smalti.config import ModelOptions
from smalti.parallel import in_bf16
from smalti_fsdp2.options import ContextOptions, FsdpOptions, enabled
from smalti_memory.options import MemoryOptions

_COPIES = 3
"""Of a block's gathered parameters: the block that computes, the one that is gathered ahead, and the buffer it arrives in."""
_OPERATIONS: Mapping[Literal["step", "micro-batch"], float] = {"step": 12, "micro-batch": 50}
"""Dispatched for each tensor, measured on CPUs: gathering and reducing; in a step, operations on DTensors."""


def _recompute(config: Config) -> Mapping[Recompute, Mapping[str, object]]:
    """Whole blocks with the option that the configuration uses for them, if it does."""
    no: dict[str, object] = {"fsdp_activation_checkpointing": False, "gradient_checkpointing": False}
    blocks = {**no, "fsdp_activation_checkpointing": True}
    full = {**blocks, "fsdp_activation_checkpointing_mode": "full"}
    return {
        "none": no,
        "selective": {**blocks, "fsdp_activation_checkpointing_mode": "selective"},
        "full": {**no, "gradient_checkpointing": True} if config[ModelOptions].gradient_checkpointing else full,
    }


def proposals(config: Config, world: World) -> list[Strategy]:
    """All ranks as one group of shards, one group per node if there are several (HSDP), and both with offload.

    Where an adapter trains, also with the frozen weights alone in host memory. One rank has nothing to share, but what its
    device cannot hold can stay in host memory.
    """
    found = [_sharded(config, world, world.size)] if world.size > 1 or enabled(config) else []
    if world.local_size not in (1, world.size):
        found.append(_sharded(config, world, world.local_size))
    if world.device.startswith("cpu"):
        return found
    streamed = [_streamed(config, each) for each in found] if world.size > 1 and _streams(config) else []
    return [*found, *streamed, *(_offloaded(each) for each in found or [_sharded(config, world, 1)])]


def _sharded(config: Config, world: World, shards: int) -> Strategy:
    options = config[FsdpOptions]
    item = 2 if in_bf16(config, world.device.partition(":")[0]) else 4
    hybrid = shards < world.size
    own = options.fsdp_shard_size or (world.local_size if world.local_size > 1 else world.size)
    context = config[ContextOptions].context_parallel_size
    return Strategy(
        name=f"hsdp-{shards}" if hybrid else "fsdp2",
        title=f"HSDP, {shards} shards" if hybrid else "FSDP2",
        options={
            "fsdp_enable": True,
            "fsdp_version": 2,
            "fsdp_shard_size": shards,
            **({"context_parallel_size": context} if context > 1 else {}),
        },
        is_configured=enabled(config) and shards == own,  # offloaded or not: that option is compared
        recompute=_recompute(config),
        divided={"weights": shards, "gradients": shards, "state": shards},
        frozen=shards,
        gathered=_COPIES,
        gathered_bytes=item,
        reduced_bytes=item + 4,  # the gradients of a block, and a copy in fp32 that is being reduced
        own_copies=True,
        operations=_OPERATIONS,
        communication=tuple(_communication(options, world, shards, item)),
        context=context,
    )


def _communication(options: FsdpOptions, world: World, shards: int, item: int) -> Iterator[Communication]:
    """Forward and backward pass gather the weights; the backward pass reduces the gradients in fp32. One rank sends nothing."""
    if world.size == 1:
        return
    share = (shards - 1) / shards
    between = shards > world.local_size
    gathers = 2 if options.fsdp_reshard_after_forward else 1
    yield Communication(
        collective="all-gather", bytes_per_parameter=gathers * item * share, ranks=shards, between_nodes=between
    )
    times: Literal["step", "micro-batch"] = "micro-batch" if options.fsdp_sync_each_batch else "step"
    yield Communication(
        collective="reduce-scatter",
        bytes_per_parameter=4 * share,
        ranks=shards,
        of="trained",
        times=times,
        between_nodes=between,
    )
    if copies := world.size // shards - 1:
        sent = 2 * 4 / shards * copies / (copies + 1)
        yield Communication(
            collective="all-reduce",
            bytes_per_parameter=sent,
            ranks=copies + 1,
            of="trained",
            times=times,
            between_nodes=True,
        )


def _streams(config: Config) -> bool:
    return MemoryOptions in config and config[ModelOptions].model_type == "lora"


def _streamed(config: Config, strategy: Strategy) -> Strategy:
    """The same with the frozen shards of blocks in host memory."""
    return replace(
        strategy,
        name=f"{strategy.name}-streamed",
        title=f"{strategy.title}, base streamed",
        options={**strategy.options, "stream_base": True, "resident_gib": config[MemoryOptions].resident_gib},
        offloaded=frozenset(("frozen",)),
    )


def _offloaded(strategy: Strategy) -> Strategy:
    """The same with all weights in host memory; gradients are copied there as they are reduced."""
    return replace(
        strategy,
        name=f"{strategy.name}-offload",
        title=f"{strategy.title}, offloaded",
        options={**strategy.options, "fsdp_cpu_offload": True},
        offloaded=frozenset(("weights", "gradients", "state", "frozen")),
    )
