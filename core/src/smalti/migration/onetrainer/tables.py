"""The keys of OneTrainer's configurations and concepts, and what each is here.

Names and defaults are those of its configuration classes (modules/util/config).
"""

from __future__ import annotations

from smalti.migration.converters import number, path, precision, switch, whole
from smalti.migration.rules import OFF, Rule, no_effect, option, read, unsupported

NAME = "OneTrainer"

FAMILIES = {
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_3": "sd3",
    "STABLE_DIFFUSION_35": "sd3",
    "PIXART_ALPHA": "pixart",
    "PIXART_SIGMA": "pixart",
    "FLUX_DEV_1": "flux",
    "FLUX_2": "flux2",
    "SANA": "sana",
    "QWEN": "qwen_image",
    "Z_IMAGE": "z_image",
}
OTHER_MODELS = (
    *("STABLE_DIFFUSION_15", "STABLE_DIFFUSION_15_INPAINTING", "STABLE_DIFFUSION_20", "STABLE_DIFFUSION_20_BASE"),
    *("STABLE_DIFFUSION_20_INPAINTING", "STABLE_DIFFUSION_20_DEPTH", "STABLE_DIFFUSION_21", "STABLE_DIFFUSION_21_BASE"),
    *("STABLE_DIFFUSION_XL_10_BASE_INPAINTING", "WUERSTCHEN_2", "STABLE_CASCADE_1", "FLUX_FILL_DEV_1", "HUNYUAN_VIDEO"),
    *("HI_DREAM_FULL", "CHROMA_1", "ANIMA", "ERNIE"),
)
"""Models that smalti does not have."""
OLD_KEYS = {
    "weight_decay": "optimizer.weight_decay",
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
    "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex",
    "enable_async_offloading": "async_offloading",
    **{f"{part}_{key}": f"{part}.{key}" for part in ("unet", "prior") for key in ("learning_rate", "weight_dtype")},
    **{f"train_{part}": f"{part}.train" for part in ("unet", "prior", "text_encoder", "text_encoder_2")},
    **{f"train_{part}_epochs": f"{part}.stop_training_after" for part in ("unet", "prior", "text_encoder", "text_encoder_2")},
    **{f"{part}_{key}": f"{part}.{key}" for part in ("text_encoder", "text_encoder_2") for key in ("learning_rate",)},
    **{f"{part}_weight_dtype": f"{part}.weight_dtype" for part in ("text_encoder", "text_encoder_2", "vae")},
}
"""Keys of older files, which had no tables."""
METHODS = {"FINE_TUNE": "full", "LORA": "lora"}
OPTIMIZERS = {
    "ADAMW": "adamw",
    "ADAMW_8BIT": "adamw8bit",
    "LION": "lion",
    "LION_8BIT": "lion",
    "ADAFACTOR": "adafactor",
    "ADAGRAD": "adagrad",
    "SGD": "sgd",
    "MUON": "muon",
    "PRODIGY": "prodigy",
}
OPTIMIZER_NOTES = {"LION_8BIT": "the optimizer state is fp32 here and takes more memory"} | {
    "SGD": "momentum of 0.9 here",
}
SCHEDULES = {
    "CONSTANT": "constant_with_warmup",
    "LINEAR": "linear",
    "COSINE": "cosine",
    "COSINE_WITH_RESTARTS": "restarts of the cosine schedule are not supported!",
    "COSINE_WITH_HARD_RESTARTS": "restarts of the cosine schedule are not supported!",
    "REX": "the REX schedule is not supported!",
    "ADAFACTOR": "the learning rate that Adafactor chooses itself is not supported!",
    "CUSTOM": "schedules of one's own are not loaded!",
}
QUANTISED = {
    "NFLOAT_4": "nf4-torchao",
    "FLOAT_8": "fp8-torchao",
    "FLOAT_W8A8": "fp8-torchao",
    "INT_W8A8": "int8-torchao",
    "INT_8": "int8-torchao",
}
BASE_DTYPES = {"BFLOAT_16": "bf16", "FLOAT_16": "bf16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"}
PARTS = ("unet", "transformer", "prior")
"""Where settings of the trained model can stand. Older files say `prior` for a transformer."""
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")


def train_dtype(value: object) -> str:
    """`mixed_precision` from OneTrainer's names of dtypes."""
    return precision({"FLOAT_16": "fp16", "BFLOAT_16": "bf16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"}.get(str(value), value))


def _part(name: str) -> tuple[Rule, ...]:
    return (
        read(f"{name}.learning_rate", "learning_rate", note="overrides learning_rate"),
        read(f"{name}.weight_dtype", "base_model_precision", "lora_base_dtype", note="of the base of a LoRA"),
        read(f"{name}.gradient_checkpointing", "gradient_checkpointing", note="true by default there"),
        read(f"{name}.guidance_scale", "flux_guidance_value", note="1 by default"),
        *no_effect("the trained part is the model itself", f"{name}.train", f"{name}.include", f"{name}.model_name"),
        *no_effect("the whole run trains", f"{name}.stop_training_after", f"{name}.stop_training_after_unit"),
        *no_effect("attention masks are those of the pipeline", f"{name}.attention_mask"),
        *no_effect("text encoders are not trained", f"{name}.train_embedding", f"{name}.dropout_probability"),
        *unsupported("activations are not offloaded", f"{name}.activation_offloading", fix="gradient_checkpointing = true"),
        *unsupported("weights are not offloaded in layers", f"{name}.offload_fraction", fix="fsdp_cpu_offload"),
    )


def _encoder(name: str) -> tuple[Rule, ...]:
    return (
        read(f"{name}.dropout_probability", "caption_dropout_probability", note="of all text encoders together here"),
        read(f"{name}.train", note="text encoders are not trained here"),
        *no_effect(
            "text encoders are frozen, and freed once captions are encoded",
            *(f"{name}.{key}" for key in ("weight_dtype", "learning_rate", "stop_training_after", "stop_training_after_unit")),
            *(f"{name}.{key}" for key in ("train_embedding", "attention_mask", "guidance_scale", "include", "model_name")),
            *(f"{name}.{key}" for key in ("gradient_checkpointing", "activation_offloading", "offload_fraction")),
        ),
        *unsupported("the layer of the text encoder is the pipeline's", f"{name}_layer_skip"),
    )


OPTIONS: tuple[Rule, ...] = (
    read("model_type", "model_family"),
    read("training_method", "model_type", note="LORA or FINE_TUNE"),
    option("base_model_name", "pretrained_model_name_or_path", path),
    option("workspace_dir", "output_dir", path, default="workspace/run"),
    *unsupported("only plain LoRA is supported", "peft_type", fix='model_type = "lora"', off=(*OFF, "LORA")),
    option("lora_rank", "lora_rank", whole, default=16),
    option("lora_alpha", "lora_alpha", number, default=1.0),
    option("dropout_probability", "lora_dropout", number),
    *unsupported("LoRA is not decomposed into magnitude and direction (DoRA)", "lora_decompose"),
    option("lora_model_name", "init_lora", path, note="rank and alpha of the file are those of the run"),
    read("layer_filter", "lora_targets", note="parts of names; by default all linear layers and convolutions, as there"),
    read("layer_filter_preset", "lora_targets", note="without layer_filter: the filter that its window sets"),
    read("layer_filter_regex", "lora_targets", note="layer_filter has regular expressions"),
    *no_effect("older files have them", "extra_model_name", "token_count", "initial_embedding_text", "latent_caching_epochs"),
    *no_effect("older files have them", "circular_mask_generation", "random_rotate_and_crop", "embedding_model_names"),
    # Run
    read("epochs", "num_train_epochs", note="100 by default; divided by the number of resolutions"),
    option("batch_size", "train_batch_size", whole, default=1),
    option("gradient_accumulation_steps", "gradient_accumulation_steps", whole),
    read("multi_gpu", "num_processes"),
    read("device_indexes", "num_processes", note="as many processes as devices"),
    option("train_dtype", "mixed_precision", train_dtype, default="FLOAT_16"),
    read("gradient_checkpointing", "gradient_checkpointing", note="ON by default; CPU_OFFLOADED is true here"),
    read("compile", "dynamo_backend", note="inductor"),
    *(rule for part in PARTS for rule in _part(part)),
    *(rule for encoder in ENCODERS for rule in _encoder(encoder)),
    read("vae.weight_dtype", "vae_dtype"),
    *no_effect("the VAE is frozen", *(f"vae.{key}" for key in ("train", "include", "model_name", "stop_training_after"))),
    *no_effect("the VAE is frozen", *(f"vae.{key}" for key in ("learning_rate", "train_embedding", "attention_mask"))),
    *no_effect("the VAE is frozen", *(f"vae.{key}" for key in ("stop_training_after_unit", "dropout_probability"))),
    *no_effect("the VAE is frozen", *(f"vae.{key}" for key in ("guidance_scale", "gradient_checkpointing"))),
    *no_effect("the VAE is frozen", "vae.activation_offloading", "vae.offload_fraction"),
    # Optimizer
    read("learning_rate", "learning_rate", note="the default is 3e-6"),
    read("learning_rate_scheduler", "lr_scheduler", note="CONSTANT has a warm-up there"),
    read("learning_rate_warmup_steps", "lr_warmup_steps", note="micro-batches there, 200 by default; up to 1, a share"),
    option("learning_rate_min_factor", "lr_end_ratio", number),
    *no_effect("only with restarts", "learning_rate_cycles"),
    *unsupported("the learning rate is not scaled by the batch", "learning_rate_scaler", off=(*OFF, "NONE")),
    option("clip_grad_norm", "max_grad_norm", number),
    read("optimizer.optimizer", "optimizer", note="ADAMW by default"),
    read("optimizer.weight_decay", "adam_weight_decay"),
    read("optimizer.beta1", "adam_beta1"),
    read("optimizer.beta2", "adam_beta2"),
    read("optimizer.eps", "adam_epsilon"),
    read("ema", "use_ema", "ema_device"),
    read("ema_decay", "ema_decay", note="per ema_update_step_interval steps there, per step here"),
    read("ema_update_step_interval", "ema_decay", note="5 by default there"),
    # Objective
    read("timestep_distribution", "timestep_distribution", note="UNIFORM or LOGIT_NORMAL; UNIFORM by default"),
    read("noising_bias", "flow_sigmoid_mean"),
    read("noising_weight", "flow_sigmoid_scale", note="1 less there"),
    read("timestep_shift", "flow_schedule_shift", note="1 by default"),
    read("dynamic_timestep_shifting", "flow_schedule_auto_shift"),
    read("mse_strength", "loss_type", note="l2 if it is the only loss"),
    read("huber_strength", "loss_type", note="huber if it is the only loss"),
    read("huber_delta", "huber_c"),
    *unsupported("this loss is not supported", "mae_strength", "log_cosh_strength"),
    *no_effect("no model here learns the variance", "vb_loss_strength", "loss_scaler"),
    read("loss_weight_fn", "snr_gamma", note="MIN_SNR_GAMMA with loss_weight_strength"),
    read("loss_weight_strength", "snr_gamma"),
    option("rescale_noise_scheduler_to_zero_terminal_snr", "rescale_betas_zero_snr", switch),
    read("force_v_prediction", "prediction_type"),
    read("force_epsilon_prediction", "prediction_type"),
    *unsupported("noise is not modified", "offset_noise_weight", "perturbation_noise_weight", "cep_gamma"),
    *no_effect("only with offset_noise_weight", "generalized_offset_noise"),
    *unsupported("the range of timesteps cannot be limited", "min_noising_strength", off=OFF),
    *unsupported("the range of timesteps cannot be limited", "max_noising_strength", off=(*OFF, 1)),
    *unsupported("losses are not masked", "masked_training"),
    *no_effect("only with masked_training", "unmasked_probability", "unmasked_weight", "normalize_masked_area_loss"),
    *no_effect("only with masked_training", "masked_prior_preservation_weight"),
    *unsupported("images are not conditioned on others", "custom_conditioning_image", "force_circular_padding"),
    # Data
    read("concept_file_name", "datasets", note="the file is read too"),
    read("concepts", "datasets"),
    read("resolution", "resolution", note="each of several sizes is a dataset of its own here; 512 by default"),
    read("aspect_ratio_bucketing", "crop_aspect", note="false: every image becomes a square"),
    *no_effect("latents and captions are cached", "image_caching", "text_caching", "latent_caching", "cache_dir", "only_cache"),
    *no_effect("latents and captions are cached", "clear_cache_before_training", "caching_threads", "dataloader_threads"),
    *no_effect("only for videos", "frames"),
    # Samples, saving
    read("sample_definition_file_name", "validation_prompt", note="the file is read too"),
    read("samples", "validation_prompt", "validation_negative_prompt", "validation_resolution"),
    read("sample_after", "validation_step_interval", note="if sample_after_unit is STEP"),
    read("sample_after_unit", "validation_step_interval"),
    read("save_every", "checkpoint_step_interval", note="if save_every_unit is STEP; else backup_after"),
    read("save_every_unit", "checkpoint_step_interval"),
    read("backup_after", "checkpoint_step_interval", note="if backup_after_unit is STEP"),
    read("backup_after_unit", "checkpoint_step_interval"),
    read("rolling_backup", "checkpoints_total_limit"),
    read("rolling_backup_count", "checkpoints_total_limit"),
    *no_effect("the same command resumes a run", "continue_last_backup", "prevent_overwrites", "backup_before_save"),
    *no_effect("every checkpoint is complete", "save_skip_first", "save_filename_prefix", "include_train_config"),
    *no_effect(
        "files for other tools are written by `smalti checkpoint export`",
        *("output_dtype", "output_model_format", "output_model_destination", "bundle_additional_embeddings"),
    ),
    *no_effect("images are written to the run directory", "sample_image_format", "sample_video_format", "sample_audio_format"),
    *no_effect("images are written to the run directory", "samples_to_tensorboard", "sample_skip_first", "non_ema_sampling"),
    *no_effect("metrics are always written to events.jsonl", "tensorboard", "tensorboard_expose", "tensorboard_always_on"),
    *no_effect("metrics are always written to events.jsonl", "tensorboard_port", "debug_mode", "debug_dir"),
    *unsupported("validation uses the concepts that are marked for it", "validation", fix="eval_steps_interval = N"),
    *no_effect("only with validation", "validate_after", "validate_after_unit"),
    *no_effect("devices and memory are handled automatically", "train_device", "temp_device", "fallback_train_dtype"),
    *no_effect("devices and memory are handled automatically", "enable_autocast_cache", "attention_mechanism"),
    *no_effect("devices and memory are handled automatically", "gradient_reduce_precision", "fused_gradient_reduce"),
    *no_effect("devices and memory are handled automatically", "async_gradient_reduce", "async_gradient_reduce_buffer"),
    *no_effect("devices and memory are handled automatically", "async_offloading", "enable_async_offloading"),
    *no_effect("devices and memory are handled automatically", "enable_activation_offloading", "prefetch_next_batch"),
    *unsupported("weights are not offloaded in layers", "layer_offload_fraction", fix="fsdp_cpu_offload; see docs/memory.md"),
    *no_effect("lora_base_dtype and base_model_precision say it here", "weight_dtype", "lora_weight_dtype"),
    *no_effect("embeddings are not trained", "embedding_learning_rate", "preserve_embedding_norm", "embedding_weight_dtype"),
    *unsupported("embeddings are not trained", "additional_embeddings"),
    *no_effect("only with another peft_type", "lora_decompose_norm_epsilon", "lora_decompose_output_axis"),
    *no_effect("only with a schedule of one's own", "custom_learning_rate_scheduler", "scheduler_params"),
    *no_effect("lengths of prompts are the family's", "text_encoder_sequence_length", "text_encoder_2_sequence_length"),
)

IGNORED = (
    *("__version", "secrets", "cloud", "embedding", "quantization", "optimizer_defaults", "effnet_encoder", "decoder"),
    *("decoder_text_encoder", "decoder_vqgan", "unconditional_transformer", "oft_", "lokr_", "dora_oft"),
)
"""Beginnings of keys that belong to other methods, other models, or to its user interface. Secrets are never read."""

CONCEPTS: tuple[Rule, ...] = (
    read("path", "instance_data_dir"),
    read("name", "id"),
    read("enabled", note="a concept that is off is left out"),
    read("balancing", "repeats", "max_num_samples", note="visits in an epoch there: N is repeats = N-1"),
    read("balancing_strategy", "repeats", "max_num_samples", note="SAMPLES is max_num_samples"),
    read("repeats", "repeats", note="as balancing, in older files"),
    read("validation_concept", "dataset_type", note="eval"),
    read("text.prompt_source", "caption_strategy", note="sample, filename, or concept with a file of one line"),
    read("text.prompt_path", "instance_prompt"),
    read("image.enable_resolution_override", "resolution"),
    read("image.resolution_override", "resolution"),
    read("image.enable_random_flip", "flip_probability", note="0.5; on by default there"),
    read("text.enable_tag_shuffling", "caption_shuffle", note="with text.keep_tags_count and text.tag_delimiter"),
    read("text.tag_dropout_enable", "caption_tag_dropout_rate", note="text.tag_dropout_mode RANDOM"),
    *no_effect("subfolders are always read", "include_subdirectories"),
    *no_effect("crops are at the centre, or drawn once with crop_style = random", "image.enable_crop_jitter"),
    *no_effect("samples are drawn by the seed of the run", "seed", "image_variations", "text_variations"),
    *unsupported("all datasets have the same weight", "loss_weight", off=(*OFF, 1)),
    *unsupported("captions are used as they are", "text.caps_randomize_enable"),
    *unsupported(
        "images are not augmented",
        *("image.enable_fixed_flip", "image.enable_random_rotate", "image.enable_fixed_rotate"),
        *("image.enable_random_brightness", "image.enable_fixed_brightness", "image.enable_random_contrast"),
        *("image.enable_fixed_contrast", "image.enable_random_saturation", "image.enable_fixed_saturation"),
        *("image.enable_random_hue", "image.enable_fixed_hue"),
    ),
    *no_effect("losses are not masked", "image.enable_random_circular_mask_shrink", "image.enable_random_mask_rotate_crop"),
)
CONCEPT_DETAILS = ("image.random_", "text.tag_", "text.keep_tags", "text.caps_", "__version", "concept_stats")
"""Beginnings of keys that only matter with one that is listed itself, or that its user interface writes."""
