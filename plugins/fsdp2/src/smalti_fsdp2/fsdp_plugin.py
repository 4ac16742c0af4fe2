"""Our options as Accelerate's own FSDP plugin, for those who train with Accelerate itself."""

from __future__ import annotations

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy

from smalti import UserError
from smalti_fsdp2.accelerate_export import backward_prefetch, strategy
from smalti_fsdp2.options import POLICIES, FsdpOptions
from smalti_fsdp2.wrapping import load_policy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": None}


def accelerate_plugin(options: FsdpOptions) -> FullyShardedDataParallelPlugin:
    """What `Accelerator(fsdp_plugin=...)` takes, with the meaning that the options have in a smalti run.

    Classes to wrap that are not given are left to the model's `_no_split_modules`, precisions that are all "auto" to
    Accelerate's `mixed_precision`. What Accelerate has no place for is not in it: recomputation mode and interval, more than
    one block gathered ahead, and in version 2 the size of a group that shares a copy, which goes into `ParallelismConfig`.

    Raises UserError for a policy that is a callable in version 2, where Accelerate 1.15 ignores it. Version 1 with
    `fsdp_cpu_ram_efficient_loading` needs an accelerator to be there. Accelerate sets `FSDP_CPU_RAM_EFFICIENT_LOADING` in the
    environment, where transformers look for it.
    """
    second = options.fsdp_version == 2
    policy = options.fsdp_auto_wrap_policy
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.fsdp_version,
        reshard_after_forward=options.fsdp_reshard_after_forward if second else None,
        sharding_strategy=None if second else strategy(options, hybrid=options.fsdp_shard_size is not None),
        cpu_offload=options.fsdp_cpu_offload,
        state_dict_type=options.fsdp_state_dict_type,
        auto_wrap_policy=policy if policy in POLICIES else _callable(policy, second=second),
        transformer_cls_names_to_wrap=_classes(options),
        min_num_params=options.fsdp_min_num_params if policy == "SIZE_BASED_WRAP" else None,
        limit_all_gathers=options.fsdp_limit_all_gathers,
        activation_checkpointing=options.fsdp_activation_checkpointing,
        cpu_ram_efficient_loading=options.fsdp_cpu_ram_efficient_loading,
        mixed_precision_policy=_precision(options),
        backward_prefetch=None if second else backward_prefetch(options),
        forward_prefetch=None if second else options.fsdp_forward_prefetch > 0,
        use_orig_params=None if second else True,
        sync_module_states=None if second else options.fsdp_cpu_ram_efficient_loading,
    )
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    return plugin


def _callable(policy: str, *, second: bool) -> CustomPolicy:
    if second:
        raise UserError(
            f"Accelerate's FSDP 2 takes no callable such as {policy} for a policy, and would wrap nothing",
            fix=f"--fsdp_auto_wrap_policy={POLICIES[0]} with --fsdp_transformer_layer_cls_to_wrap, or --fsdp_version=1",
        )
    return CustomPolicy(load_policy(policy))


def _classes(options: FsdpOptions) -> list[str] | None:
    if options.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP":
        return None
    return list(options.fsdp_transformer_layer_cls_to_wrap) or None


def _precision(options: FsdpOptions) -> MixedPrecisionPolicy | MixedPrecision | None:
    """Gradients are averaged in fp32 unless something else is said; parameters and outputs that are "auto" keep their type."""
    if {options.fsdp_param_dtype, options.fsdp_reduce_dtype, options.fsdp_output_dtype} == {"auto"}:
        return None
    parameters = _DTYPES[options.fsdp_param_dtype]
    gradients = _DTYPES[options.fsdp_reduce_dtype] or torch.float32
    if options.fsdp_version == 1:
        return MixedPrecision(param_dtype=parameters, reduce_dtype=gradients)
    return MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=gradients, output_dtype=_DTYPES[options.fsdp_output_dtype])
