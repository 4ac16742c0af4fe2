"""SimpleTuner's options of the model, of adapters, of precision and of memory."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.conversions import attention, sets, streamed_base
from smalti_migrate.simpletuner.flavours import flavour, flux_targets
from smalti_migrate.simpletuner.lycoris import adapter_kind, unless_lycoris
from smalti_migrate.simpletuner.rules import Rule, ignored, refused, renamed, same

_LESS_MEMORY = "use gradient_checkpointing, base_model_precision or FSDP2 with fsdp_cpu_offload"
_ONCE = "texts are encoded once, before training, with unquantised encoders"

_PRECISIONS: Mapping[str, tuple[object, str]] = {
    "int8-quanto": ("int8-torchao", "8 bits of torchao"),
    "int8-sdnq": ("int8-torchao", "8 bits of torchao"),
    "uint8-sdnq": ("int8-torchao", "8 bits of torchao"),
    "int4-quanto": ("nf4-torchao", "4 bits in normal float format"),
    "int4-torchao": ("nf4-torchao", "4 bits in normal float format"),
    "int4-sdnq": ("nf4-torchao", "4 bits in normal float format"),
    "uint4-sdnq": ("nf4-torchao", "4 bits in normal float format"),
    "nf4-bnb": ("nf4-torchao", "the same format of torchao"),
    "int2-quanto": ("nf4-torchao", "the fewest bits here are 4, which take twice the memory"),
    "fp8-quanto": ("fp8-torchao", "8 bits of torchao"),
    "fp8uz-quanto": ("fp8-torchao", "8 bits of torchao"),
    "fp8wo-torchao": ("fp8-torchao", ""),
    "fp8-sdnq": ("fp8-torchao", "8 bits of torchao"),
}
_FAMILIES: Mapping[str, tuple[object, str]] = {
    **dict.fromkeys(("pixart_sigma", "pixart-sigma"), ("pixart", "")),
    "cosmos2image": ("cosmos", ""),
}

MODEL_KEYS: Mapping[str, Rule] = {
    # The model and its parts
    "model_family": same(_FAMILIES),
    "model_flavour": same(convert=flavour, why="the names of models differ"),
    "model_flavor": same(convert=flavour, why="the names of models differ"),
    "vae_dtype": same({"default": ("auto", ""), "fp16": ("auto", "fp16 is not supported")}),
    "pretrained_vae_model_name_or_path": refused(
        "the VAE of the pipeline is used",
        "remove it, or put the VAE into the pipeline's folder",
        "madebyollin/sdxl-vae-fp16-fix",
    ),
    "pretrained_transformer_model_name_or_path": refused(
        "the trained model is always pretrained_model_name_or_path",
        "name the transformer there, and its pipeline in base_pipeline",
    ),
    "pretrained_unet_model_name_or_path": refused(
        "the trained model is always pretrained_model_name_or_path", "name the U-Net there, and its pipeline in base_pipeline"
    ),
    "pretrained_t5_model_name_or_path": refused(
        "the text encoders of the pipeline are used", "give a pipeline that contains it: pretrained_model_name_or_path"
    ),
    "pretrained_gemma_model_name_or_path": refused(
        "the text encoders of the pipeline are used", "give a pipeline that contains it: pretrained_model_name_or_path"
    ),
    "pretrained_text_encoder_model_name_or_path": refused(
        "the text encoders of the pipeline are used", "give a pipeline that contains it: pretrained_model_name_or_path"
    ),
    "text_encoder_revision": ignored("a pipeline has one revision"),
    "pretrained_transformer_subfolder": ignored("folders have the names of the diffusers layout", "transformer", "none"),
    "pretrained_unet_subfolder": ignored("folders have the names of the diffusers layout", "unet", "none"),
    "non_ema_revision": ignored("a pipeline has one set of weights"),
    "control": refused("channel-wise control is not supported", "remove it, to train on images and captions", False),
    "controlnet": refused("ControlNet is not supported", "set it to false, to train the model itself", False),
    "controlnet_custom_config": ignored("ControlNet is not supported"),
    "controlnet_model_name_or_path": ignored("ControlNet is not supported"),
    "tread_config": refused("TREAD is not supported", "remove it; every token passes every layer"),
    "refiner_training": refused("the SDXL refiner is not supported", "set it to false", False),
    "refiner_training_invert_schedule": ignored("the SDXL refiner is not supported", False),
    "refiner_training_strength": ignored("the SDXL refiner is not supported", 0.2),
    "sdxl_refiner_uses_full_range": ignored("the SDXL refiner is not supported", False),
    "data_aesthetic_score": ignored("the SDXL refiner is not supported", 7.0),
    "sana_complex_human_instruction": refused("the instruction of the pipeline is used", "remove it"),
    "t5_padding": refused("padding is what the model's tokenizer makes it", "set it to unmodified", "unmodified"),
    "sd3_clip_uncond_behaviour": refused("an empty prompt is encoded as an empty text", "remove it", "empty_string"),
    "sd3_t5_uncond_behaviour": refused("an empty prompt is encoded as an empty text", "remove it", "empty_string"),
    "flux_attention_masked_training": refused("tokens of padding are not masked for Flux", "set it to false", False),
    "flux_fast_schedule": refused("the discrete schedule is not supported", "set it to false", False),
    "flux_guidance_mode": refused("a random guidance scale is not supported", "flux_guidance_value=NUMBER", "constant"),
    "flux_guidance_min": ignored("it is part of flux_guidance_mode=random-range", 0.0),
    "flux_guidance_max": ignored("it is part of flux_guidance_mode=random-range", 4.0),
    "unet_attention_slice": ignored("it changes speed and memory only", False),
    "model_kwargs": refused("a pipeline's components are built as their folders say", "remove it"),
    # Adapters
    "lora_type": renamed("lora_kind", neutral=("standard",), convert=adapter_kind),
    "lycoris_config": ignored("lora_type = lycoris reads it"),
    "init_lokr_norm": ignored("a LoKr begins without a change of the model"),
    "lora_rank": same(convert=unless_lycoris("lora_rank"), why="lycoris_config says it"),
    "lora_alpha": same(convert=unless_lycoris("lora_alpha"), why="lycoris_config says it"),
    "lora_dropout": same(convert=unless_lycoris("lora_dropout"), why="lycoris_config says it"),
    "peft_lora_mode": refused("SingLoRA is not supported", "set it to standard", "standard"),
    "singlora_ramp_up_steps": ignored("SingLoRA is not supported", 0),
    "use_dora": renamed("lora_kind", neutral=(False,), convert=sets("lora_kind", "dora")),
    "slider_lora_target": refused("layers are chosen with lora_targets, of a slider too", "set it to false", False),
    "init_lora": same(),
    "lora_format": ignored("smalti checkpoint export chooses the format of an adapter", "diffusers"),
    "peft_lora_target_modules": renamed("lora_targets"),
    "lora_init_type": same(
        {"default": ("kaiming", ""), "true": ("kaiming", "")},
    ),
    "flux_lora_target": renamed("lora_targets", "the names of the layers", convert=flux_targets),
    # Precision
    "base_model_precision": same(_PRECISIONS),
    "base_model_default_dtype": renamed("lora_base_dtype"),
    "quantize_via": ignored("weights are quantised on the training device, layer by layer", "accelerator"),
    "quantization_config": refused("weights are quantised as base_model_precision says", "remove it"),
    "quantize_activations": refused("base_model_precision says it", "set it to false; int8-rowwise quantises both", False),
    "text_encoder_1_precision": ignored(_ONCE, "no_change"),
    "text_encoder_2_precision": ignored(_ONCE, "no_change"),
    "text_encoder_3_precision": ignored(_ONCE, "no_change"),
    "text_encoder_4_precision": ignored(_ONCE, "no_change"),
    "gradient_precision": ignored("gradients are fp32", "unmodified", "fp32"),
    "disable_tf32": renamed("allow_tf32", "the opposite", neutral=(False,), convert=sets("allow_tf32", False)),
    "attention_mechanism": renamed(
        "sdpa_backend", "another kernel for the same result", neutral=("diffusers", "native"), convert=attention
    ),
    "sageattention_usage": ignored("SageAttention is not supported"),
    "sla_config": ignored("sparse-linear attention is not supported"),
    "fuse_qkv_projections": ignored("it changes speed only", False),
    "fused_qkv_projections": ignored("it changes speed only", False),
    # Memory
    "gradient_checkpointing_interval": ignored("every block is checkpointed: less memory, slower steps", 0, 1),
    "gradient_checkpointing_segment_stride": ignored("every block is checkpointed: less memory, slower steps", 0, 1),
    "gradient_checkpointing_backend": ignored("activations are recomputed, not offloaded", "torch"),
    "enable_group_offload": refused("group offloading is not supported", _LESS_MEMORY, False),
    "enable_model_cpu_offload": refused("model offloading is not supported", _LESS_MEMORY, False),
    "ramtorch": renamed(
        "stream_base", "frozen weights of blocks are copied from host memory", neutral=(False,), convert=streamed_base
    ),
    "musubi_blocks_to_swap": refused("block swap is not supported", _LESS_MEMORY, 0),
    "musubi_block_swap_device": ignored("block swap is not supported", "cpu"),
    "enable_chunked_feed_forward": ignored("it changes speed and memory only", False),
    "feed_forward_chunk_size": ignored("it changes speed and memory only"),
    "offload_during_startup": ignored("encoders are in memory one at a time, and released before training"),
    "offload_during_save": ignored("a checkpoint is written from a copy in host memory"),
    "accelerator_cache_clear_interval": ignored("the allocator's cache is kept between steps"),
    "fully_unload_text_encoder": ignored("encoders are released before training"),
    "keep_vae_loaded": ignored("the VAE is loaded when it is needed", False),
    "vae_enable_patch_conv": ignored("it is for videos", False),
    "vae_enable_temporal_roll": ignored("it is for videos", False),
    "set_grads_to_none": ignored("gradients are released after each step"),
}
