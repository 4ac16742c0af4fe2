"""The options of sharding and of context parallelism, and what they mean together. Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, field_validator

from smalti import Config, Names, Options, option

StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Precision = Literal["auto", "fp32", "bf16"]
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _state_dict_type(value: object) -> object:
    """`sharded` and `full` stand for the long names."""
    word = str(value).strip().upper().replace("-", "_")
    return word if word.endswith("_STATE_DICT") else f"{word}_STATE_DICT"


def _version(value: object) -> object:
    """`v2` and `fsdp2` stand for 2."""
    return re.sub(r"^\s*(fsdp|v)[-_ ]?(?=\d)", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value


def _in_one_word(value: object) -> object:
    """`all-to-all` stands for `alltoall`."""
    return re.sub("[-_ ]", "", str(value)).lower()


def _policy(value: str) -> str:
    """One of the policies in any spelling, or "module.name" of a callable."""
    word = value.strip().upper().replace("-", "_")
    for policy in POLICIES:
        if word in (policy, policy.removesuffix("_WRAP"), policy.removesuffix("_BASED_WRAP")):
            return policy
    if "." in value and all(part.isidentifier() for part in value.replace(":", ".").split(".")):
        return value
    raise ValueError(f"{value!r} is none of {', '.join(POLICIES)}, and no dotted path to a callable")


class FsdpOptions(Options):
    fsdp_enable: bool = option(
        False,
        help="Shard parameters, gradients and optimizer state over the ranks with FSDP.",
        accelerate="distributed_type=FSDP",
    )
    fsdp_version: Annotated[int, BeforeValidator(_version)] = option(
        2, help="FSDP version: 2, or 1 (deprecated).", level="advanced", accelerate="fsdp_config.fsdp_version", ge=1, le=2
    )
    fsdp_reshard_after_forward: bool = option(
        True,
        help="Free gathered parameters between forward and backward.",
        tradeoff="less memory, one more all-gather per block",
        accelerate="fsdp_config.fsdp_reshard_after_forward",
    )
    fsdp_state_dict_type: Annotated[StateDictType, BeforeValidator(_state_dict_type)] = option(
        "SHARDED_STATE_DICT",
        help="Content of a checkpoint: shards, or also the full weights in one file for other tools.",
        accelerate="fsdp_config.fsdp_state_dict_type",
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        False,
        help="Load initial weights on rank 0 and scatter the shards.",
        tradeoff="only rank 0 ever holds the full model, slower start",
        accelerate="fsdp_config.fsdp_cpu_ram_efficient_loading",
    )
    fsdp_auto_wrap_policy: Annotated[str, AfterValidator(_policy)] = option(
        "TRANSFORMER_BASED_WRAP",
        help="Wrapping policy: TRANSFORMER_BASED_WRAP (each block), SIZE_BASED_WRAP, NO_WRAP, or module.callable.",
        accelerate="fsdp_config.fsdp_auto_wrap_policy",
    )
    fsdp_transformer_layer_cls_to_wrap: Names = option(
        (),
        help="Block classes to wrap. Default: detected (see `smalti detect-blocks`).",
        when="fsdp_auto_wrap_policy == TRANSFORMER_BASED_WRAP",
        accelerate="fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    )
    fsdp_min_num_params: int = option(
        100_000_000,
        help="Parameters per wrapped group.",
        level="advanced",
        when="fsdp_auto_wrap_policy == SIZE_BASED_WRAP",
        accelerate="fsdp_config.fsdp_min_num_params",
        ge=1,
    )
    fsdp_cpu_offload: bool = option(
        False,
        help="Keep parameters, gradients and optimizer state in host memory.",
        tradeoff="much less accelerator memory, much slower steps",
        aliases=["fsdp_offload_params"],
        accelerate="fsdp_config.fsdp_offload_params",
    )
    fsdp_sync_each_batch: bool = option(
        True,
        help="Reduce gradients over the ranks in every micro-batch, so that each rank holds only its shard.",
        level="advanced",
        when="gradient_accumulation_steps > 1",
        tradeoff="less memory, one reduce-scatter per micro-batch instead of one per step",
    )
    fsdp_limit_all_gathers: bool = option(
        True,
        help="Limit how many blocks are gathered ahead. Version 2 always does.",
        level="expert",
        accelerate="fsdp_config.fsdp_limit_all_gathers",
    )
    fsdp_activation_checkpointing: bool = option(
        False,
        help="Recompute the activations of blocks in the backward pass.",
        tradeoff="much less memory, slower steps",
        accelerate="fsdp_config.fsdp_activation_checkpointing",
    )
    fsdp_activation_checkpointing_mode: Literal["full", "selective"] = option(
        "full",
        help="What to recompute: the full block, or all but matrix products and attention.",
        level="advanced",
        when="fsdp_activation_checkpointing",
    )
    fsdp_activation_checkpointing_every: int = option(
        1, help="Recompute every N-th block.", level="advanced", when="fsdp_activation_checkpointing", ge=1
    )
    fsdp_param_dtype: Precision = option(
        "auto", help="Dtype of gathered parameters. auto: as mixed_precision.", level="advanced"
    )
    fsdp_reduce_dtype: Precision = option("auto", help="Dtype of gradient reduction. auto: fp32.", level="advanced")
    fsdp_output_dtype: Precision = option("auto", help="Dtype of the model's output. auto: unchanged.", level="expert")
    fsdp_bf16_blocks: bool = option(
        False,
        help="Compute blocks in bf16 throughout, norms and sums too. Needs parameters that are gathered in bf16.",
        level="advanced",
        tradeoff="reads and writes less memory; losses differ by the noise of bf16",
    )
    fsdp_forward_prefetch: int = option(
        1, help="Blocks to gather ahead in the forward pass.", level="advanced", tradeoff="faster steps, more memory", ge=0
    )
    fsdp_backward_prefetch: int = option(
        1, help="Blocks to gather ahead in the backward pass.", level="advanced", tradeoff="faster steps, more memory", ge=0
    )
    fsdp_symmetric_memory: bool = option(
        False,
        help="Gather and reduce in symmetric memory of NCCL, on NVIDIA GPUs that are linked by NVLink.",
        level="expert",
        tradeoff="communication takes less of the GPU; not measured yet",
    )
    fsdp_shard_size: int | None = option(
        None,
        help="Ranks per model replica; replicas stay synchronised. Default: one replica per node.",
        level="advanced",
        ge=1,
    )


class ContextOptions(Options):
    context_parallel_size: int = option(
        1,
        help="Split the tokens of each image over this many ranks. Enables FSDP 2.",
        level="advanced",
        accelerate="parallelism_config.parallelism_config_cp_size",
        ge=1,
    )
    context_parallel_comm_strategy: Annotated[Literal["allgather", "alltoall"], BeforeValidator(_in_one_word)] = option(
        "allgather",
        help="Attention over all tokens: gather keys and values (allgather), or exchange heads for tokens (alltoall).",
        level="advanced",
        when="context_parallel_size > 1",
        accelerate="parallelism_config.parallelism_config_cp_comm_strategy",
    )

    @field_validator("context_parallel_comm_strategy")
    @classmethod
    def _alone(cls, value: str, info: ValidationInfo) -> str:
        """One rank has no strategy: whatever is exported says so."""
        return value if info.data.get("context_parallel_size", 1) > 1 else "allgather"


CONTEXT_ON_CPU = "SMALTI_CONTEXT_PARALLEL_ON_CPU"
"""Set in the environment, it lets tests split tokens on processors."""


def enabled(config: Config) -> bool:
    """Whether this run is sharded: asked for, or needed by context parallelism."""
    return config[FsdpOptions].fsdp_enable or splits_context(config)


def named_classes(config: Config) -> tuple[str, ...]:
    """The classes that the user named as blocks of a sharded run; empty when they are to be detected, or do not matter."""
    options = config[FsdpOptions]
    if not enabled(config) or options.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP":
        return ()
    return options.fsdp_transformer_layer_cls_to_wrap


def splits_context(config: Config) -> bool:
    return config[ContextOptions].context_parallel_size > 1


def context_without_fsdp2(config: Config) -> bool:
    """Whether tokens are to be split although FSDP is explicitly off, or is version 1."""
    return splits_context(config) and (_switched_off(config) or config[FsdpOptions].fsdp_version == 1)


def _switched_off(config: Config) -> bool:
    return not config[FsdpOptions].fsdp_enable and config.source("fsdp_enable") != "default"
