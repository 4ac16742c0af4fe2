"""The keys of ai-toolkit's configurations, below `config.process[0]`, and what each is here.

Names and defaults are those of its configuration classes (toolkit/config_modules.py).
"""

from __future__ import annotations

from smalti_migrate.converters import SAMPLERS, choice, number, path, precision, switch, text, whole
from smalti_migrate.rules import OFF, Rule, no_effect, option, read, unsupported

NAME = "ai-toolkit"

SLIDER = "concept_slider"
TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer", SLIDER)
"""Values of `type` that train a model on images."""
FAMILIES = (
    {"sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux2": "flux2", "flux2_klein_4b": "flux2", "flux2_klein_9b": "flux2"}
    | {"lumina2": "lumina2", "pixart": "pixart", "pixart_sigma": "pixart", "auraflow": "auraflow"}
    | {"qwen_image": "qwen_image", "zimage": "z_image", "anima": "anima", "chroma": "chroma", "ernie_image": "ernie"}
    | {"sd1": "sd1x", "sd2": "sd2x"}
)
"""`model.arch` -> our family. What stands after a colon there is only a label."""
OLD_FAMILIES = {"is_xl": "sdxl", "is_v3": "sd3", "is_flux": "flux", "is_lumina2": "lumina2", "is_pixart": "pixart"} | {
    "is_pixart_sigma": "pixart",
    "is_auraflow": "auraflow",
    "is_v2": "sd2x",
}
OTHER_KINDS = ("is_ssd", "is_vega")
"""Models that smalti does not have, in older files. Where a file has none of these and none of those, it is SD 1."""
OPTIMIZERS = {"adamw": "adamw", "adamw8bit": "adamw8bit", "adamw8": "adamw8bit", "lion": "lion", "lion8bit": "lion"} | {
    "adafactor": "adafactor",
    "adagrad": "adagrad",
    "prodigy": "prodigy",
}
OPTIMIZER_NOTES = {"lion8bit": "the optimizer state is fp32 here and takes more memory"}
SCHEDULES = (
    {"constant": "constant", "cosine": "cosine", "constant_with_warmup": "constant_with_warmup"}
    | {"polynomial": "polynomial", "linear": "it raises the learning rate from a third of it there!"}
    | {"cosine_with_restarts": "restarts of the cosine schedule are not supported!"}
    | {"step": "learning rates in steps are not supported!"}
)
QUANTISED = {"qfloat8": "fp8-torchao", "float8": "fp8-torchao", "qint8": "int8-torchao", "int8": "int8-torchao"} | {
    "qint4": "nf4-torchao",
    "uint4": "nf4-torchao",
}
TIMESTEPS = {
    "sigmoid": "logit_normal",
    "linear": "uniform",
    "weighted": "uniform",
    "shift": "uniform",
    "flux_shift": "uniform",
} | {"lumina2_shift": "uniform"}
"""`train.timestep_type` -> how timesteps are sampled. Only the last three are shifted, by the image size."""

ADAPTED = ("train_text_encoder", "text_encoder_lr", "text_encoder_2_lr", "lora_targets")

FILE: tuple[Rule, ...] = (
    read("config.name", "output_dir"),
    *no_effect("""
        - written into exported files there | meta.*
        - what the file is for | job config.version version
    """),
)
"""What stands around the process."""
OPTIONS: tuple[Rule, ...] = (
    read("type", note="only trainers of images"),
    read("training_folder", "output_dir", note="the folder of a run is training_folder/name, as there; output by default"),
    read("trigger_word", "trigger_word", note="a key of each dataset; put before captions that lack it, as there"),
    # Adapter
    read("network.type", "model_type", note="lora; without a network, full"),
    read("network.linear", "lora_rank", note="4 by default there"),
    read("network.rank", "lora_rank", note="as network.linear, which it overrides"),
    read(
        "network.linear_alpha",
        "lora_alpha",
        note="1 by default; of other models than SD 1, SD 2, SDXL, PixArt and AuraFlow the rank",
    ),
    read("network.alpha", "lora_alpha", note="if there is no network.linear_alpha"),
    option("network.dropout", "lora_dropout", number),
    read("network.conv", "lora_targets", note="of SD and SDXL, if rank and alpha are those of the other layers"),
    read("network.conv_alpha", "lora_targets", note="as network.conv, which is the default there"),
    read("network.transformer_only", "lora_targets", note="on by default there: all linear layers of the blocks"),
    read(
        "network.network_kwargs.ignore_if_contains",
        "lora_targets",
        note="not for FLUX.2 and Chroma, whose layers differ in name",
    ),
    read("network.network_kwargs.only_if_contains", "lora_targets", note="as network.network_kwargs.ignore_if_contains"),
    # Model
    option("model.name_or_path", "pretrained_model_name_or_path", path),
    option("model.extras_name_or_path", "base_pipeline", path),
    read("model.arch", "model_family"),
    *(read(f"model.{key}", "model_family") for key in OLD_FAMILIES),
    read("model.quantize", "base_model_precision", note="only of a LoRA"),
    read("model.qtype", "base_model_precision", note="qfloat8 by default there"),
    option("model.assistant_lora_path", "assistant_lora", path, note="off in samples and in the exported adapter, as there"),
    option("model.is_v_pred", "prediction_type", choice({"true": "v_prediction", "false": None}), note="v_prediction"),
    option("model.compile", "dynamo_backend", choice({"true": "inductor", "false": None}), note="inductor"),
    # Training
    read("train.steps", "max_train_steps", note="micro-batches there if gradient_accumulation_steps is above 1"),
    option("train.batch_size", "train_batch_size", whole, default=1),
    read("train.gradient_accumulation", "gradient_accumulation_steps"),
    read("train.gradient_accumulation_steps", "gradient_accumulation_steps", note="steps there count micro-batches then"),
    option("train.gradient_checkpointing", "gradient_checkpointing", switch, default=True),
    option("train.dtype", "mixed_precision", precision, note="fp16 becomes auto: bf16 where the device has it", default="fp32"),
    read("train.lr", "learning_rate", note="the default is 1e-6"),
    read("train.train_text_encoder", *ADAPTED, note="of a LoRA of SD or SDXL, at the rate of the run"),
    read("train.optimizer", "optimizer"),
    read("train.optimizer_params.weight_decay", "adam_weight_decay"),
    read("train.optimizer_params.betas", "adam_beta1", "adam_beta2"),
    read("train.optimizer_params.eps", "adam_epsilon", note="1e-6 by default there, 1e-8 here"),
    read("train.lr_scheduler", "lr_scheduler", note="constant by default"),
    read("train.lr_scheduler_params.num_warmup_steps", "lr_warmup_steps", note="1000 by default with constant_with_warmup"),
    read("train.lr_scheduler_params.eta_min", "lr_end_ratio", note="a learning rate there, a share of it here"),
    option("train.max_grad_norm", "max_grad_norm", number),
    read("train.ema_config.use_ema", "use_ema"),
    read("train.ema_config.ema_decay", "ema_decay", note="0.999 by default there; warmed up here"),
    read("train.noise_scheduler", note="flowmatch for flow models, ddpm for others: the family says it here"),
    read("train.timestep_type", "timestep_distribution", "flow_schedule_shift", "flow_schedule_auto_shift"),
    read("train.loss_type", "loss_type", note="mse is l2"),
    option("train.min_snr_gamma", "snr_gamma", number, note="not for flow models"),
    read("train.disable_sampling", "validation_prompt", note="prompts are left out"),
    # Saving, logging, samples
    option("save.save_every", "checkpoint_step_interval", whole, default=1000),
    option("save.max_step_saves_to_keep", "checkpoints_total_limit", whole),
    read("save.push_to_hub", "push_to_hub", note="at the end, as there"),
    read("save.hf_repo_id", "hub_model_id"),
    read("save.hf_private", "hub_private", note="false by default there; private here unless it is given"),
    option("logging.log_every", "log_interval", whole),
    option("logging.use_wandb", "report_to", choice({"true": ["wandb"], "false": None}), note="wandb"),
    option("logging.project_name", "tracker_project_name", text),
    read("sample.prompts", "validation_prompt"),
    read("sample.samples", "validation_prompt"),
    read("sample.sample_every", "validation_step_interval", note="100 by default there"),
    read("sample.width", "validation_resolution", note="512 by default there"),
    read("sample.height", "validation_resolution", note="512 by default there"),
    read("sample.seed", "validation_seed", note="0 by default there"),
    read("sample.walk_seed", "validation_seed", note="seeds count up here, as with walk_seed"),
    read("sample.guidance_scale", "validation_guidance", note="7 by default there"),
    read("sample.sample_steps", "validation_num_inference_steps", note="20 by default there"),
    option("sample.sampler", "validation_noise_scheduler", choice(SAMPLERS, fix="leave it out: the family has a default")),
    read("sample.neg", "validation_negative_prompt"),
    option("sample.network_multiplier", "validation_adapter_strength", number),
    option("sample.guidance_rescale", "validation_guidance_rescale", number),
    read("train.inverted_mask_prior", "prior_outside_mask"),
    read("train.inverted_mask_prior_multiplier", "prior_outside_mask", note="only with inverted_mask_prior", off=(*OFF, 0.5)),
    read("train.diff_output_preservation", "preserve", note="class"),
    read("train.diff_output_preservation_class", "preserve_class"),
    read("train.diff_output_preservation_multiplier", "preserve_weight", off=(*OFF, 1)),
    read("train.blank_prompt_preservation", "preserve", note="blank"),
    read("train.blank_prompt_preservation_multiplier", "preserve_weight", off=(*OFF, 1)),
    read("train.min_denoising_steps", "timestep_max", note="counted from noise there; of linear and sigmoid timesteps"),
    read("train.max_denoising_steps", "timestep_min", note="likewise", off=(*OFF, 999, 1000)),
    read("slider.positive_prompt", "slider_positive", note="of the type concept_slider"),
    read("slider.negative_prompt", "slider_negative"),
    read("slider.guidance_strength", "slider_guidance", note="3 by default, as there"),
    read("slider.anchor_class", "preserve", "preserve_prompts", note="blank if it is an empty text"),
    read("slider.anchor_strength", "preserve_weight", note="half of it; 1 by default there", off=(*OFF, 1)),
    read("slider.target_class", note="here a slider starts from the captions of the images"),
    *no_effect("""
        - only for adapters that are listed themselves | network.lokr_full_rank network.lokr_factor
          network.split_multistage_loras
        - text encoders are freed once captions are encoded | model.quantize_te model.qtype_te model.te_device model.te_dtype
          model.text_encoder_bits
        - weights are quantised as they are loaded | model.low_vram model.quantize_kwargs.*
        - dtypes follow mixed_precision | model.dtype model.vae_dtype model.vae_device
        - the model is loaded as its pipeline describes it | model.use_flux_cfg
        - only with layer_offloading | model.layer_offloading_transformer_percent model.layer_offloading_text_encoder_percent
        - the trained part is the model itself | train.train_unet
        - only of text encoders that are trained here, see train.train_text_encoder | model.use_text_encoder_1
          model.use_text_encoder_2
        - everything trains at train.lr there | train.unet_lr train.text_encoder_lr
        - only with a key that is listed itself | train.reg_weight train.switch_boundary_every
        - torch's attention is always used | train.xformers train.sdp train.attention_backend
        - captions are encoded once, and text encoders freed | train.unload_text_encoder train.cache_text_embeddings
        - the first images are sampled at the first interval | train.skip_first_sample train.force_first_sample
        - files for other tools are written by `smalti checkpoint export` | save.dtype save.save_format
        - the run is named after its folder | logging.run_name logging.verbose logging.use_ui_logger
        - the family samples as its pipeline does | sample.format sample.fps sample.num_frames sample.sample_start_step
          sample.refiner_start_at
        - written by its user interface | sqlite_db_path device performance_log_every is_test
    """),
    *unsupported("""
        - the model is loaded as its pipeline describes it | model.model_kwargs.*
        - the other components come from the pipeline | model.vae_path model.te_name_or_path model.unet_path | base_pipeline
          names a pipeline in diffusers layout that has them
        - no adapter is added to the base model | model.lora_path model.inference_lora_path model.accuracy_recovery_adapter
        - the model is not split over GPUs | model.split_model_over_gpus | --fsdp_enable
        - all frozen blocks of a LoRA are streamed, or none | model.layer_offloading | stream_base = true for a LoRA,
          else fsdp_cpu_offload; see docs/memory.md
        - attention masks of Flux are not applied | model.attn_masking
        - files for SSD-1B and Vega are not read | model.is_ssd model.is_vega
        - the EMA does not change the weights | train.ema_config.use_feedback
        - a weight over timesteps is not supported | train.linear_timesteps train.linear_timesteps2
        - another weighting than min-SNR | train.snr_gamma | snr_gamma is min_snr_gamma here
        - noise and latents are not modified | train.noise_offset train.dynamic_noise_offset train.force_consistent_noise
          train.blended_blur_noise
        - there is no loss of guidance | train.do_guidance_loss
        - the guidance embedding is always used | train.bypass_guidance_embedding | flux_guidance_value = 1
        - parameters are all trained in every step | train.do_paramiter_swapping
    """),
    *unsupported(
        """
        - weights are not scaled | train.ema_config.param_multiplier
        - noise and latents are not modified | train.noise_multiplier train.img_multiplier
        """,
        off=(*OFF, 1),
    ),
    *unsupported("- timesteps are not favoured by content or style | train.content_or_style", off=(*OFF, "balanced")),
    read("datasets", "datasets"),
)

DATASETS: tuple[Rule, ...] = (
    read("folder_path", "instance_data_dir"),
    read("dataset_path", "instance_data_dir"),
    read("resolution", "resolution", note="each size of a list is a dataset of its own, as there; 512 by default"),
    read("shuffle_tokens", "caption_shuffle", note="a few variants are encoded before training, unless texts are not cached"),
    read("keep_tokens", "caption_shuffle", note="position_start"),
    read("token_dropout_rate", "caption_tag_dropout_rate"),
    read("mask_path", "mask_path"),
    read("alpha_mask", "alpha_mask"),
    read("invert_mask", "mask_invert"),
    read("mask_min_value", "mask_floor", note="one for all datasets here; grey places of masks are raised less here"),
    read("flip_x", "flip_probability", "repeats", note="0.5, and twice the visits: each image once more, mirrored, there"),
    read("caption_ext", "datasets", note="key caption_extension of a dataset"),
    read("default_caption", "instance_prompt", note="caption of images without a caption file"),
    read("trigger_word", "trigger_word"),
    read("num_repeats", "repeats", note="repeats counts additional visits: N there is N-1 here"),
    read("caption_dropout_rate", "caption_dropout_probability", note="0 by default there"),
    read("buckets", "crop_aspect", note="false: every image becomes a square"),
    read("square_crop", "crop_aspect", note="square"),
    read("bucket_tolerance", "aspect_bucket_alignment", note="64 by default there"),
    read("random_crop", "crop_style"),
    read("is_reg", note="left out; here `is_regularisation_data` trains towards the model without the adapter"),
    read("num_frames", note="videos are not supported: the dataset is left out"),
    *no_effect("""
        - latents and captions are cached by default | cache_latents cache_latents_to_disk cache_text_embeddings
          cache_clip_vision_to_disk num_workers prefetch_factor
        - only for videos or control images | shrink_video_to_frames fps do_i2v do_audio auto_frame_count
          full_size_control_images
        - every dataset has images | type fast_image_size
    """),
    *unsupported("""
        - captions are used as they are | random_triggers replacements
        - images are only mirrored, left to right | flip_y augments augmentations random_scale
        - control images are not supported | control_path inpaint_path clip_image_path controls control_path_1 control_path_2
          control_path_3
        - latents are not standardised | standardize_images
    """),
    *unsupported(
        """
        - captions are used as they are | random_triggers_max
        - all datasets have the same weight | network_weight loss_multiplier
        - images are not scaled before they are cropped | scale
        """,
        off=(*OFF, 1),
    ),
)

SAMPLES: tuple[Rule, ...] = (
    read("prompt", "validation_prompt"),
    read("width", "validation_resolution"),
    read("height", "validation_resolution"),
    read("neg", "validation_negative_prompt", note="one for all prompts"),
    read("seed", "validation_seed", note="of the first prompt; it counts up here"),
    read("guidance_scale", "validation_guidance", note="one for all prompts"),
    read("sample_steps", "validation_num_inference_steps", note="one for all prompts"),
    read("network_multiplier", "validation_adapter_strength", note="one for all prompts"),
    *no_effect("- the family samples as its pipeline does | fps num_frames"),
    *unsupported("- control images are not supported | ctrl_img* ctrl_idx"),
)
