"""The options of this package. Imports no torch."""

from __future__ import annotations

from smalti import Config, Options, option

SLOTS = 2
"""Blocks on the device at the same time: the one that computes, and the one that is copied ahead or was just used."""


class MemoryOptions(Options):
    stream_base: bool = option(
        False,
        help="Keep the frozen weights of blocks in host memory, and copy each to the accelerator just before it computes. With "
        "FSDP each rank keeps its shards of them.",
        tradeoff="memory for two blocks instead of all, two copies of the weights over the bus per micro-batch",
    )
    resident_gib: float = option(
        0.0,
        help="Frozen weights of blocks that stay on the accelerator all the same, in GiB.",
        tradeoff="fewer copies, more memory",
        when="stream_base",
        level="advanced",
        ge=0,
    )
    pinned_gib: float | None = option(
        None,
        help="Pinned host memory for a rank's streamed or offloaded weights, in GiB; more streamed weights go to a file. "
        "Default: three quarters of the free host memory, shared by the ranks of a node.",
        tradeoff="less host memory that cannot be swapped, slower copies of what is beyond it",
        level="advanced",
        ge=0,
    )


class ActivationOptions(Options):
    offload_activations: bool = option(
        False,
        help="Keep the inputs of recomputed blocks in host memory until the backward pass needs them.",
        tradeoff="memory for activations, two copies of each over the bus, beside computation",
        level="advanced",
    )


def streams_base(config: Config) -> bool:
    """Whether frozen weights are to be in host memory. The plugin that has the option may be left out of a run."""
    return MemoryOptions in config and config[MemoryOptions].stream_base


def under_fsdp(config: Config) -> bool:
    """Whether FSDP spreads the run over ranks, which then streams each rank's shards."""
    known = config.schema.options
    asked = "fsdp_enable" in known and config.value("fsdp_enable")
    return bool(asked or ("context_parallel_size" in known and config.value("context_parallel_size") != 1))
