"""Our options in the words of Accelerate: the part of a launch's YAML that is about FSDP and context parallelism."""

from __future__ import annotations

from smalti import Config
from smalti.config import LaunchOptions
from smalti_fsdp2.accelerate_import import IDLE, OFFLOAD, OFFLOAD_OPTION, PARALLELISM, full_name, section, unused
from smalti_fsdp2.options import ContextOptions, FsdpOptions


def fragment(config: Config) -> dict[str, object]:
    """What a sharded launch puts into the user's Accelerate YAML; None takes a key out.

    Older spellings of what is said here go, so that the file says each thing once. Keys that mean nothing to smalti stay as
    they are, but for those with which Accelerate would not load weights on one rank only.
    """
    options, launch = config[FsdpOptions], config[LaunchOptions]
    size = options.fsdp_shard_size or launch.num_processes // launch.num_machines
    settings = fsdp_settings(options, hybrid=size < launch.num_processes)
    if OFFLOAD_OPTION in config.schema.options and OFFLOAD in map(full_name, section(config.accelerate, "fsdp_config")):
        settings[OFFLOAD] = config.value(OFFLOAD_OPTION)
    stale = dict.fromkeys(unused(config.accelerate, settings))
    kept = section(config.accelerate, "fsdp_config") if not options.fsdp_cpu_ram_efficient_loading else {}
    changed = {key: value for key, value in settings.items() if not (key in IDLE and key in kept)}
    found: dict[str, object] = {"distributed_type": "FSDP", "fsdp_config": {**stale, **changed}}
    if options.fsdp_version == 2 and (sizes := _parallelism(config, size)):
        found["parallelism_config"] = sizes
    return found


def fsdp_settings(options: FsdpOptions, *, hybrid: bool) -> dict[str, object]:
    """The keys of fsdp_config, all of them spelled out; None for one that should not stand there.

    `hybrid`: groups of ranks each have a copy of the model.
    """
    by_size = options.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP"
    settings: dict[str, object] = {
        "fsdp_version": options.fsdp_version,
        "fsdp_reshard_after_forward": options.fsdp_reshard_after_forward,
        "fsdp_offload_params": options.fsdp_cpu_offload,
        "fsdp_auto_wrap_policy": options.fsdp_auto_wrap_policy,
        "fsdp_transformer_layer_cls_to_wrap": ",".join(options.fsdp_transformer_layer_cls_to_wrap) or None,
        "fsdp_min_num_params": options.fsdp_min_num_params if by_size else None,
        "fsdp_state_dict_type": options.fsdp_state_dict_type,
        "fsdp_cpu_ram_efficient_loading": options.fsdp_cpu_ram_efficient_loading,
        "fsdp_activation_checkpointing": options.fsdp_activation_checkpointing,
        # Accelerate has it in its plugin and not in its files.
        "fsdp_limit_all_gathers": None if options.fsdp_limit_all_gathers else False,
    }
    if options.fsdp_version == 2:
        return settings
    name = strategy(options, hybrid=hybrid)
    return {
        **settings,
        # `accelerate config` writes the second, `accelerate launch` heeds the first alone.
        "fsdp_sharding_strategy": name,
        "fsdp_reshard_after_forward": name,
        "fsdp_backward_prefetch": backward_prefetch(options),
        "fsdp_forward_prefetch": options.fsdp_forward_prefetch > 0,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": options.fsdp_cpu_ram_efficient_loading,
    }


def strategy(options: FsdpOptions, *, hybrid: bool) -> str:
    """The sharding strategy of version 1."""
    if hybrid:
        return "HYBRID_SHARD" if options.fsdp_reshard_after_forward else "HYBRID_SHARD_ZERO2"
    return "FULL_SHARD" if options.fsdp_reshard_after_forward else "SHARD_GRAD_OP"


def backward_prefetch(options: FsdpOptions) -> str:
    """The backward prefetch of version 1."""
    return "BACKWARD_PRE" if options.fsdp_backward_prefetch else "NO_PREFETCH"


def _parallelism(config: Config, size: int) -> dict[str, object]:
    """How the ranks are split, where they are not one group that shares one copy; the product is the number of ranks.

    Context ranks hold shards too, so a group that shares a copy is shards x context.
    """
    ranks, context = config[LaunchOptions].num_processes, config[ContextOptions].context_parallel_size
    user = section(config.accelerate, "parallelism_config")
    if size % context or not (user or size < ranks or context > 1):
        return {}
    sizes: dict[str, object] = {"dp_replicate_size": ranks // size, "dp_shard_size": size // context, "cp_size": context}
    if context > 1:
        sizes["cp_comm_strategy"] = config[ContextOptions].context_parallel_comm_strategy
    return {**user, **{f"{PARALLELISM}{name}": value for name, value in sizes.items()}}
