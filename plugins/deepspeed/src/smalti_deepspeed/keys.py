"""The keys of a DeepSpeed configuration, as of 0.19. A test holds these tables to DeepSpeed's own."""

from __future__ import annotations

from typing import Literal

Kind = Literal["switch", "count", "number", "share", "path", "table", "stage", "device", "type", "any"]
"""What stands under a key: true or false, a whole number from 0 on, any number, a number from 0 to 1, a table, ..."""

TOP = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("zero_optimization", "optimizer", "scheduler", "bf16", "bfloat16", "fp16", "torch_autocast", "data_types"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation"),
        *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
        *("gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather", "dataloader_drop_last"),
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "disable_python_gc"),
        *("activation_checkpointing", "checkpoint", "datastates_ckpt", "aio", "timers", "flops_profiler", "comms_logger"),
        *("tensorboard", "wandb", "csv_monitor", "comet", "vocabulary_size", "weight_quantization", "compile"),
        *("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size", "use_data_before_expert_parallelism"),
        *("autotuning", "data_efficiency", "hybrid_engine"),
    )
)
SETTINGS: dict[str, Kind] = {
    **dict.fromkeys(
        (
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation"),
            *("prescale_gradients", "disable_allgather", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
            "disable_python_gc",
        ),
        "switch",
    ),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), "type"),
    **dict.fromkeys(("data_types", "aio", "timers", "flops_profiler", "comms_logger"), "table"),
    "gradient_predivide_factor": "number",
    "steps_per_print": "count",
    "train_batch_size": "count",
}
"""Those at the top that are no option of smalti's, and what stands under them."""
BF16: dict[str, Kind] = dict.fromkeys(
    ("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "switch",
)
DATA_TYPES: dict[str, Kind] = {
    **dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), "type"),
    "keep_in_fp32_modules": "any",
}
NAMED = frozenset(("type", "name", "params", "legacy_fusion"))
"""What stands in an `optimizer` or `scheduler`; settings are in `params`."""
OPTIMIZER: dict[str, Kind] = {
    **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "any"),  # for the options that they are
    **dict.fromkeys(("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fused", "foreach"), "switch"),
    **dict.fromkeys(("set_grad_none", "fp32_optimizer_states", "eps_inside_sqrt"), "switch"),
    **dict.fromkeys(("max_coeff", "min_coeff", "lr_decay", "initial_accumulator_value", "momentum"), "number"),
}
"""What the optimizers of DeepSpeed that smalti uses take between them."""
SCHEDULER: dict[str, Kind] = dict.fromkeys(
    (
        *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
        *("warmup_min_ratio", "cos_min_ratio", "last_batch_iteration"),
    ),
    "any",
)
ZERO: dict[str, Kind] = {
    "stage": "stage",
    "offload_param": "table",
    "offload_optimizer": "table",
    "zenflow": "table",
    "leaf_module": "table",
    **dict.fromkeys(
        (
            *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
        ),
        "count",
    ),
    **dict.fromkeys(
        (
            *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions"),
            *("overlap_comm", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint", "cpu_offload_param"),
            *("cpu_offload_use_pin_memory", "cpu_offload", "stage3_gather_16bit_weights_on_model_save"),
            *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters"),
            *("stage3_gather_fp16_weights_on_model_save", "legacy_stage1", "round_robin_gradients", "parameter_alignment"),
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
            *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
        ),
        "switch",
    ),
}
OFFLOAD_PARAM: dict[str, Kind] = {
    "device": "device",
    "nvme_path": "path",
    "buffer_count": "count",
    "buffer_size": "count",
    "max_in_cpu": "count",
    "pin_memory": "switch",
}
OFFLOAD_OPTIMIZER: dict[str, Kind] = {
    "device": "device",
    "nvme_path": "path",
    "buffer_count": "count",
    "pin_memory": "switch",
    "pipeline_read": "switch",
    "pipeline_write": "switch",
    "fast_init": "switch",
    "ratio": "share",
    "super_offload": "switch",
    "cpuadam_cores_perc": "share",
}
SHORT = {key.removeprefix("stage3_"): key for key in ZERO if key.startswith("stage3_")}
"""Names of stage 3 without their prefix, which DeepSpeed takes as well."""

REMOVED_TOP = frozenset(
    (
        *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention"),
        *("elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
    )
)
REMOVED_ZERO = frozenset(("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"))
"""What DeepSpeed 0.19 has no more, and refuses."""

ACCELERATES = {
    "zero3_init_flag": "the model is never whole on a rank in stage 3",
    "zero3_save_16bit_model": "checkpoints hold the weights in fp32, and `smalti checkpoint export` writes others",
    "zero3_gather_16bit_weights_on_model_save": "checkpoints are written by the ranks together, without gathering",
}
"""Keys of Accelerate's that are found in configurations: what happens instead of what they ask for."""
OTHERWISE = {
    "activation_checkpointing": "--gradient_checkpointing recomputes activations",
    "checkpoint": "smalti writes the checkpoints",
    "datastates_ckpt": "smalti writes the checkpoints",
    "dataloader_drop_last": "smalti loads the data, and drops nothing",
    "pipeline": "no model family is split into stages",
    "gradient_allreduce_op": "gradients are averaged",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "--report_to names the trackers of a run"),
}
"""Keys that DeepSpeed reads for what smalti does itself."""
REFUSED = {
    "autotuning": "smalti launches no trials",
    "data_efficiency": "the order of samples is smalti's own",
    "expert_parallel": "no model family has experts",
    "hybrid_engine": "it is for language models that generate while they train",
    "tensor_parallel": "smalti has no tensor parallelism",
    "weight_quantization": "it is for inference",
    "torch_autocast": "--mixed_precision sets the precision of the computation",
    "compile": "--dynamo_backend compiles block by block",
}
"""Sections that ask for something that smalti cannot do under DeepSpeed, once they are switched on."""
FIXED = {
    "prescale_gradients": (False, "ZeRO has the average of gradients as they are"),
    "gradient_predivide_factor": (1, "ZeRO has the average of gradients as they are"),
    "managed_gradient_accumulation": (True, "smalti tells DeepSpeed which micro-batch is a step's last"),
}
"""Settings at the top that have to be what they are by themselves, and why."""
SWITCHED_OFF = {
    "round_robin_gradients": "DeepSpeed 0.19 would look for parameters where others lie, and so would checkpoints",
}
"""Settings of ZeRO that are set to false, with a notice: `_link_all_hp_params` of `stage_1_and_2.py`. Results are the same."""
FAILING = {
    "stage3_module_granularity_threshold": "the backward pass then fails at parameters that are not gathered",
}
"""Settings of ZeRO that go wrong once they are switched on, and how."""
REFUSED_ZERO = frozenset(
    ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
)
"""Variants of ZeRO that nobody has tried with smalti's checkpoints."""
