"""The keys of OneTrainer's configurations and concepts, and what each is here.

Names and defaults are those of its configuration classes (modules/util/config).
"""

from __future__ import annotations

from smalti_migrate.converters import number, path, precision, switch, whole
from smalti_migrate.rules import OFF, Rule, no_effect, option, read, secret, unsupported

NAME = "OneTrainer"

FAMILIES = (
    {"STABLE_DIFFUSION_XL_10_BASE": "sdxl", "STABLE_DIFFUSION_3": "sd3", "STABLE_DIFFUSION_35": "sd3"}
    | {"PIXART_ALPHA": "pixart", "PIXART_SIGMA": "pixart", "FLUX_DEV_1": "flux", "FLUX_2": "flux2", "SANA": "sana"}
    | {
        "STABLE_DIFFUSION_15": "sd1x",
        **dict.fromkeys((f"STABLE_DIFFUSION_2{each}" for each in ("0", "0_BASE", "1", "1_BASE")), "sd2x"),
    }
    | {"QWEN": "qwen_image", "Z_IMAGE": "z_image", "CHROMA_1": "chroma", "ERNIE": "ernie", "ANIMA": "anima"}
    | {"KREA_2": "krea2", "IDEOGRAM_4": "ideogram"}
)
OTHER_MODELS = (
    *("STABLE_DIFFUSION_15_INPAINTING", "STABLE_DIFFUSION_20_INPAINTING", "STABLE_DIFFUSION_20_DEPTH"),
    *("STABLE_DIFFUSION_XL_10_BASE_INPAINTING", "WUERSTCHEN_2", "STABLE_CASCADE_1", "FLUX_FILL_DEV_1", "HUNYUAN_VIDEO"),
    "HI_DREAM_FULL",
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
OPTIMIZERS = {"ADAMW": "adamw", "ADAMW_8BIT": "adamw8bit", "LION": "lion", "LION_8BIT": "lion", "ADAFACTOR": "adafactor"} | {
    "ADAGRAD": "adagrad",
    "SGD": "sgd",
    "CAME": "came",
    "CAME_8BIT": "came",
    "MUON": "muon",
    "SCHEDULE_FREE_ADAMW": "adamw_schedulefree",
    "PRODIGY": "prodigy",
}
OPTIMIZER_NOTES = dict.fromkeys(("LION_8BIT", "CAME_8BIT"), "the optimizer state is fp32 here and takes more memory") | {
    "SGD": "momentum of 0.9 here",
}
SCHEDULES = (
    {"CONSTANT": "constant_with_warmup", "LINEAR": "linear", "COSINE": "cosine"}
    | {"COSINE_WITH_RESTARTS": "restarts of the cosine schedule are not supported!"}
    | {"COSINE_WITH_HARD_RESTARTS": "restarts of the cosine schedule are not supported!"}
    | {"REX": "the REX schedule is not supported!"}
    | {"ADAFACTOR": "the learning rate that Adafactor chooses itself is not supported!"}
    | {"CUSTOM": "schedules of one's own are not loaded!"}
)
QUANTISED = {"NFLOAT_4": "nf4-torchao", "FLOAT_8": "fp8-torchao", "FLOAT_W8A8": "fp8-rowwise", "INT_W8A8": "int8-rowwise"} | {
    "INT_8": "int8-torchao"
}
BASE_DTYPES = {"BFLOAT_16": "bf16", "FLOAT_16": "bf16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"}
PARTS = ("unet", "transformer", "prior")
"""Where settings of the trained model can stand. Older files say `prior` for a transformer."""
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
PREDICTIONS = {"force_epsilon_prediction": "epsilon"} | dict.fromkeys(
    ("force_v_prediction", "rescale_noise_scheduler_to_zero_terminal_snr"), "v_prediction"
)
"""Switches -> what the model predicts then; the last counts."""
STOPPED = ("train_text_encoder_frac", "train_text_encoder_steps")
ADAPTED = ("train_text_encoder", "text_encoder_lr", "text_encoder_2_lr", "lora_targets")


def train_dtype(value: object) -> str:
    """`mixed_precision` from OneTrainer's names of dtypes."""
    return precision({"FLOAT_16": "fp16", "BFLOAT_16": "bf16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"}.get(str(value), value))


def _part(name: str) -> tuple[Rule, ...]:
    return (
        read(f"{name}.learning_rate", "learning_rate", note="overrides learning_rate"),
        read(f"{name}.weight_dtype", "base_model_precision", "lora_base_dtype", note="of the base of a LoRA"),
        read(f"{name}.gradient_checkpointing", "gradient_checkpointing", note="true by default there"),
        read(f"{name}.guidance_scale", "flux_guidance_value", note="1 by default"),
        *no_effect(f"""
        - the trained part is the model itself | {name}: train include model_name
        - the whole run trains | {name}: stop_training_after stop_training_after_unit
        - attention masks are those of the pipeline | {name}: attention_mask
        - text encoders are not trained | {name}: train_embedding dropout_probability
        """),
        *unsupported(f"""
        - activations are not offloaded | {name}: activation_offloading | gradient_checkpointing = true
        - weights are not offloaded in layers | {name}: offload_fraction | fsdp_cpu_offload
        """),
    )


def _encoder(name: str) -> tuple[Rule, ...]:
    return (
        read(f"{name}.dropout_probability", "caption_dropout_probability", note="of all text encoders together here"),
        read(
            f"{name}.train",
            *ADAPTED,
            *STOPPED,
            note="of a LoRA of SD or SDXL, where it is true by default; others are not trained here",
        ),
        *no_effect(f"""
        - only of text encoders that are trained here, see train | {name}: learning_rate stop_training_after
          stop_training_after_unit
        - text encoders are kept as they are loaded | {name}: weight_dtype train_embedding attention_mask guidance_scale include
          model_name gradient_checkpointing activation_offloading offload_fraction
        """),
    )


OPTIONS: tuple[Rule, ...] = (
    read("model_type", "model_family"),
    read("training_method", "model_type", note="LORA or FINE_TUNE"),
    option("base_model_name", "pretrained_model_name_or_path", path),
    option("workspace_dir", "output_dir", path, default="workspace/run"),
    option("lora_rank", "lora_rank", whole, default=16),
    option("lora_alpha", "lora_alpha", number, default=1.0),
    read("peft_type", "lora_kind", note="LORA or LOHA", off=(*OFF, "LORA")),
    read("lora_decompose", "lora_kind", note="dora, with lora_decompose_output_axis"),
    read("lora_decompose_output_axis", "lora_kind", note="with lora_decompose"),
    read("min_noising_strength", "timestep_min", note="of uniform timesteps, with their shift", off=(*OFF, 0)),
    read("max_noising_strength", "timestep_max", note="as min_noising_strength", off=(*OFF, 1)),
    option("dropout_probability", "lora_dropout", number),
    option("lora_model_name", "init_lora", path, note="rank and alpha of the file are those of the run"),
    read("layer_filter", "lora_targets", note="parts of names; by default all linear layers and convolutions, as there"),
    read("layer_filter_preset", "lora_targets", note="without layer_filter: the filter that its window sets"),
    read("layer_filter_regex", "lora_targets", note="layer_filter has regular expressions"),
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
    read("text_encoder_layer_skip", "clip_skip", note="of SD 1 and 2"),
    *unsupported(f"""
        - the layer of the text encoder is the pipeline's | {" ".join(f"{name}_layer_skip" for name in ENCODERS[1:])}
    """),
    read("vae.weight_dtype", "vae_dtype"),
    # Optimizer
    read("learning_rate", "learning_rate", note="the default is 3e-6"),
    read("learning_rate_scheduler", "lr_scheduler", note="CONSTANT has a warm-up there"),
    read("learning_rate_warmup_steps", "lr_warmup_steps", note="micro-batches there, 200 by default; up to 1, a share"),
    option("learning_rate_min_factor", "lr_end_ratio", number),
    option("clip_grad_norm", "max_grad_norm", number),
    read("optimizer.optimizer", "optimizer", note="ADAMW by default"),
    read("optimizer.weight_decay", "adam_weight_decay"),
    read("optimizer.beta1", "adam_beta1"),
    read("optimizer.beta2", "adam_beta2"),
    read("optimizer.eps", "adam_epsilon"),
    read("optimizer", "optimizer", note="in older files"),
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
    read("loss_weight_fn", "snr_gamma", note="MIN_SNR_GAMMA with loss_weight_strength"),
    read("loss_weight_strength", "snr_gamma"),
    option("rescale_noise_scheduler_to_zero_terminal_snr", "rescale_betas_zero_snr", switch),
    read("force_v_prediction", "prediction_type"),
    read("force_epsilon_prediction", "prediction_type"),
    # Data
    read("concept_file_name", "datasets", note="the file is read too"),
    read("concepts", "datasets"),
    read("resolution", "resolution", note="each of several sizes is a dataset of its own here; 512 by default"),
    read("aspect_ratio_bucketing", "crop_aspect", note="false: every image becomes a square"),
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
    read("masked_training", "mask_floor", note="files -masklabel.png beside the images: mask_suffix of each dataset"),
    read("unmasked_weight", "mask_floor", note="only with masked_training", off=(*OFF, 0.1)),
    read("unmasked_probability", "mask_probability", note="the share of visits with masks here", off=(*OFF, 0.1)),
    read("normalize_masked_area_loss", "mask_normalise", note="only with masked_training"),
    read("masked_prior_preservation_weight", "prior_outside_mask", note="only with masked_training"),
    *no_effect("""
        - older files have them | extra_model_name token_count initial_embedding_text latent_caching_epochs
          circular_mask_generation random_rotate_and_crop embedding_model_names
        - the VAE is frozen | vae.activation_offloading vae.offload_fraction
        - only with restarts | learning_rate_cycles
        - no model here learns the variance | vb_loss_strength loss_scaler
        - only with offset_noise_weight | generalized_offset_noise
        - latents and captions are cached | image_caching text_caching latent_caching cache_dir only_cache
          clear_cache_before_training caching_threads dataloader_threads
        - only for videos | frames
        - the same command resumes a run | continue_last_backup prevent_overwrites backup_before_save
        - every checkpoint is complete | save_skip_first save_filename_prefix include_train_config
        - files for other tools are written by `smalti checkpoint export` | output_dtype output_model_format
          output_model_destination bundle_additional_embeddings
        - images are written to the run directory | sample_image_format sample_video_format sample_audio_format
          samples_to_tensorboard sample_skip_first non_ema_sampling
        - metrics are always written to events.jsonl | tensorboard tensorboard_expose tensorboard_always_on tensorboard_port
          debug_mode debug_dir
        - only with validation | validate_after validate_after_unit
        - devices and memory are handled automatically | train_device temp_device fallback_train_dtype enable_autocast_cache
          attention_mechanism gradient_reduce_precision fused_gradient_reduce async_gradient_reduce
          async_gradient_reduce_buffer async_offloading enable_async_offloading enable_activation_offloading
          prefetch_next_batch
        - lora_base_dtype and base_model_precision say it here | weight_dtype lora_weight_dtype
        - embeddings are not trained | embedding_learning_rate preserve_embedding_norm embedding_weight_dtype
        - rounding of lengths that are never 0 | lora_decompose_norm_epsilon
        - only with a schedule of one's own | custom_learning_rate_scheduler scheduler_params
        - lengths of prompts are the family's | text_encoder_sequence_length text_encoder_2_sequence_length
        - only of other methods | embedding.* oft_* lokr_* dora_oft*
        - only of other models | effnet_encoder.* decoder* unconditional_transformer.*
        - written by its user interface | __version cloud* optimizer_defaults.*
        - the VAE is frozen | vae: train include model_name stop_training_after learning_rate train_embedding attention_mask
          stop_training_after_unit dropout_probability guidance_scale gradient_checkpointing
        - how the optimizer computes, not what | optimizer: fused foreach capturable differentiable is_paged optim_bits
          __version min_8bit_size quant_block_size block_wise fused_back_pass use_triton stochastic_rounding log_every
          fsdp_in_use
        """),
    *unsupported("""
        - this setting of the optimizer has no option | optimizer.*
        - this loss is not supported | mae_strength log_cosh_strength
        - noise is not modified | offset_noise_weight perturbation_noise_weight cep_gamma
        - images are not conditioned on others | custom_conditioning_image force_circular_padding
        - validation uses the concepts that are marked for it | validation | eval_steps_interval = N
        - all frozen blocks of a LoRA are streamed, or none | layer_offload_fraction | stream_base = true for a LoRA,
          else fsdp_cpu_offload; see docs/memory.md
        - embeddings are not trained | additional_embeddings
        - which layers are quantised is not chosen here | quantization.*
    """),
    *unsupported("- the learning rate is not scaled by the batch | learning_rate_scaler", off=(*OFF, "NONE")),
    *secret("secrets*"),
)

CONCEPTS: tuple[Rule, ...] = (
    read("path", "instance_data_dir"),
    read("name", "id"),
    read("enabled", note="a concept that is off is left out"),
    read("balancing", "repeats", "max_num_samples", note="visits in an epoch there: N is repeats = N-1"),
    read("balancing_strategy", "repeats", "max_num_samples", note="SAMPLES is max_num_samples"),
    read("repeats", "repeats", note="as balancing, in older files"),
    read("type", "dataset_type", "is_regularisation_data", note="VALIDATION is eval, PRIOR_PREDICTION is_regularisation_data"),
    read("validation_concept", "dataset_type", note="eval"),
    read("loss_weight", "loss_weight", off=(*OFF, 1)),
    read("text.prompt_source", "caption_strategy", note="sample, filename, or concept with a file of one line"),
    read("text.prompt_path", "instance_prompt"),
    read("image.enable_resolution_override", "resolution"),
    read("image.resolution_override", "resolution", off=(*OFF, "512")),
    read("image.enable_random_flip", "flip_probability", note="0.5"),
    read("text.enable_tag_shuffling", "caption_shuffle"),
    read("text.keep_tags_count", "caption_shuffle", note="position_start", off=(*OFF, 1)),
    read("text.tag_delimiter", "caption_shuffle", note="split_on; a comma by default", off=(*OFF, ",")),
    read("text.tag_dropout_enable", "caption_tag_dropout_rate"),
    read("text.tag_dropout_mode", "caption_tag_dropout_rate", note="only RANDOM", off=(*OFF, "FULL")),
    read("text.tag_dropout_probability", "caption_tag_dropout_rate"),
    *no_effect("""
        - subfolders are always read | include_subdirectories
        - crops are at the centre, or drawn once with crop_style = random | image.enable_crop_jitter
        - samples are drawn by the seed of the run | seed image_variations text_variations
        - only with what is listed itself | image.random_* text.caps_*
        - written by its user interface | __version image.__version text.__version concept_stats*
        - losses are not masked | image.enable_random_circular_mask_shrink image.enable_random_mask_rotate_crop
    """),
    *unsupported("""
        - all tags are dropped alike | text.tag_dropout_special_tags*
        - captions are used as they are | text.caps_randomize_enable
        - images are not augmented | image.enable_fixed_flip image.enable_random_rotate image.enable_fixed_rotate
          image.enable_random_brightness image.enable_fixed_brightness image.enable_random_contrast
          image.enable_fixed_contrast image.enable_random_saturation image.enable_fixed_saturation image.enable_random_hue
          image.enable_fixed_hue
    """),
)

SAMPLES: tuple[Rule, ...] = (
    read("prompt", "validation_prompt"),
    read("enabled", note="a sample that is off is left out"),
    read("width", "validation_resolution", note="512 by default there"),
    read("height", "validation_resolution", note="512 by default there"),
    read("seed", "validation_seed", note="of the first prompt; it counts up here"),
    read("diffusion_steps", "validation_num_inference_steps", note="one for all prompts"),
    read("cfg_scale", "validation_guidance", note="one for all prompts"),
    read("negative_prompt", "validation_negative_prompt", note="one for all prompts"),
    *no_effect("""
        - only for videos or audio | frames length
        - the seed is always given | random_seed
        - written by its user interface | __version transformer_attention_mask force_last_timestep
    """),
    *unsupported("""
        - one option says it for all prompts | noise_scheduler | validation_noise_scheduler
        - control images are not supported | sample_inpainting base_image_path mask_image_path
        - text encoders have the layers of the pipeline | text_encoder_*layer_skip
    """),
)
