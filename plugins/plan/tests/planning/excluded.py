"""Pairs of features that save memory and exclude each other: what asks for both, and how a launch refuses it."""

import json

ZERO = f"deepspeed_config={json.dumps({'zero_optimization': {'stage': 2}})}"
STREAMED = ("model_type=lora", "stream_base", "gradient_checkpointing")
GRAPHS = ("dynamo_backend=inductor", "dynamo_mode=max-autotune")

EXCLUDED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("`--stream_base`", "training all weights"): (
        ("stream_base", "gradient_checkpointing", "model_type=full"),
        "stream_base needs weights that do not train",
    ),
    ("`--stream_base`", "no recomputation"): (("model_type=lora", "stream_base"), "stream_base needs gradient_checkpointing"),
    ("`--stream_base`", "CUDA graphs"): (
        (*STREAMED, *GRAPHS),
        "does not work with stream_base: weights move between places in memory",
    ),
    ("`--stream_base`", "`--fsdp_cpu_offload`"): (
        (*STREAMED, "fsdp_enable", "fsdp_cpu_offload"),
        "fsdp_cpu_offload keeps all shards there",
    ),
    ("`--stream_base`", "`--no_fsdp_reshard_after_forward`"): (
        (*STREAMED, "fsdp_enable", "no_fsdp_reshard_after_forward"),
        "without fsdp_reshard_after_forward the device keeps all blocks gathered",
    ),
    ("`--stream_base`", "`--fsdp_auto_wrap_policy=NO_WRAP`"): (
        (*STREAMED, "fsdp_enable", "fsdp_auto_wrap_policy=NO_WRAP"),
        "stream_base needs blocks that are gathered one by one",
    ),
    ("`--stream_base`", "DeepSpeed"): (
        (*STREAMED, ZERO),
        "streaming of the base and DeepSpeed cannot be enabled simultaneously",
    ),
    ("FSDP", "DeepSpeed"): (("fsdp_enable", ZERO), "FSDP and DeepSpeed cannot be enabled simultaneously"),
    ("FSDP 1", "LoRA"): (
        ("model_type=lora", "fsdp_enable", "fsdp_version=1"),
        "FSDP 1 would save the frozen model with every adapter",
    ),
    ("FSDP", "CUDA graphs"): (
        ("fsdp_enable", *GRAPHS),
        "does not work with FSDP: parameters are gathered into other memory in every pass",
    ),
    ("recomputation", "CUDA graphs"): (("gradient_checkpointing", *GRAPHS), "does not work with --gradient_checkpointing"),
    ("`--gradient_checkpointing`", "`--fsdp_activation_checkpointing`"): (
        ("fsdp_enable", "gradient_checkpointing", "fsdp_activation_checkpointing"),
        "activations would be recomputed twice",
    ),
    ("`--base_model_precision`", "training all weights"): (
        ("model_type=full", "base_model_precision=int8-torchao"),
        "beside them only an adapter can be trained",
    ),
    ("`--release_gradients`", "gradient accumulation"): (
        ("release_gradients", "max_grad_norm=0", "gradient_accumulation_steps=2"),
        "release_gradients leaves no gradients to add those of the next micro-batch to",
    ),
    ("`--release_gradients`", "a limit of the whole norm"): (
        ("release_gradients", "max_grad_norm=1"),
        "release_gradients updates weights before the norm of all gradients is known",
    ),
    ("`--release_gradients`", "DeepSpeed"): (
        (ZERO, "release_gradients", "max_grad_norm=0"),
        "release_gradients does not go with DeepSpeed, which keeps fp32 weights",
    ),
    ("`--base_model_precision=int8-rowwise`", "training all weights"): (
        ("model_type=full", "base_model_precision=int8-rowwise"),
        "beside them only an adapter can be trained",
    ),
    ("`--optimizer=adafactor`", "DeepSpeed"): ((ZERO, "optimizer=adafactor"), "Adafactor does not work under DeepSpeed"),
    ("`--optimizer=adamw8bit`", "DeepSpeed"): (
        (ZERO, "optimizer=adamw8bit"),
        "AdamW with its state in 8 bits does not work under DeepSpeed",
    ),
}
"""By the two features: options, and a part of the message."""


def refusals(config, plugins) -> list[str]:
    """What a launch of this draft of a configuration is refused with."""
    from smalti.launch.checks import find_problems

    return [str(problem) for problem in find_problems(config, plugins)]
