"""The options of kohya's sd-scripts and the keys of its dataset files, and what each is here.

Names and defaults are those of its argument parser and of its page on dataset configurations.
"""

from __future__ import annotations

from smalti_migrate.converters import SAMPLERS, choice, minutes, number, path, precision, switch, text, whole
from smalti_migrate.rules import OFF, Rule, no_effect, option, read, secret, unsupported

NAME = "kohya's sd-scripts"

SCRIPTS = (
    {"sdxl_train_network.py": ("sdxl", "lora"), "sdxl_train.py": ("sdxl", "full")}
    | {"flux_train_network.py": ("flux", "lora"), "flux_train.py": ("flux", "full")}
    | {"sd3_train_network.py": ("sd3", "lora"), "sd3_train.py": ("sd3", "full")}
    | {"lumina_train_network.py": ("lumina2", "lora"), "lumina_train.py": ("lumina2", "full")}
    | {"anima_train_network.py": ("anima", "lora"), "anima_train.py": ("anima", "full")}
    | {"train_network.py": ("sd1x", "lora"), "train_db.py": ("sd1x", "full"), "fine_tune.py": ("sd1x", "full")}
)
"""Script -> our family and model_type. Those of Stable Diffusion 1 train 2 too, and those of Flux Chroma."""
VARIANTS = {"sd1x": ("v2", (True, "true", "True"), "sd2x"), "flux": ("model_type", ("chroma",), "chroma")}
"""Family -> the key, and its values, with which it is another family."""
OTHER_SCRIPTS = (
    *("train_textual_inversion.py", "sdxl_train_textual_inversion.py", "train_controlnet.py", "train_control_net.py"),
    *("sdxl_train_control_net.py", "sdxl_train_control_net_lllite.py", "flux_train_control_net.py", "train_leco.py"),
    *("hunyuan_image_train_network.py", "sdxl_train_leco.py"),
)
"""Scripts for what smalti does not train."""

NETWORKS = {"networks.lora": "", "networks.lora_fa": "", "networks.lora_flux": "flux", "networks.lora_sd3": "sd3"} | {
    "networks.lora_lumina": "lumina2",
    "networks.lora_anima": "anima",
}
"""Modules of plain LoRA -> the family that they are for, if there is only one."""
FAMILY_KEYS = {
    "gemma2": "lumina2",
    "clip_g": "sd3",
    "guidance_scale": "flux",
    "model_prediction_type": "flux",
    "ae": "flux",
} | {"qwen3": "anima"}
"""Keys that only the scripts of one family have; the first that occurs decides."""

OPTIMIZERS = (
    {"adamw": "adamw", "": "adamw", "adamw8bit": "adamw8bit", "pagedadamw": "adamw", "pagedadamw8bit": "adamw8bit"}
    | {"pagedadamw32bit": "adamw", "torch.optim.adamw": "adamw", "lion": "lion", "lion8bit": "lion"}
    | {"pagedlion8bit": "lion", "prodigy": "prodigy", "adafactor": "adafactor", "sgdnesterov": "sgd"}
    | {"sgdnesterov8bit": "sgd", "adamwschedulefree": "adamw_schedulefree", "came_pytorch.came": "came"}
)
OPTIMIZER_NOTES = (
    {"pagedadamw8bit": "the optimizer state is not paged here"}
    | {"lion8bit": "the optimizer state is fp32 here and takes more memory"}
    | {"pagedlion8bit": "the optimizer state is fp32 here and takes more memory"}
    | {"pagedadamw": "the optimizer state is not paged here", "pagedadamw32bit": "the optimizer state is not paged here"}
    | {"sgdnesterov": "plain momentum of 0.9 here, not Nesterov's"}
    | {"sgdnesterov8bit": "plain momentum of 0.9 here, not Nesterov's; the optimizer state is fp32"}
)
SCHEDULES = (
    {"constant": "constant", "constant_with_warmup": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    | {"cosine_with_restarts": "cosine", "cosine_with_min_lr": "cosine", "polynomial": "polynomial"}
    | {"warmup_stable_decay": "warmup_stable_decay"}
    | {"adafactor": "the learning rate that Adafactor chooses itself is not supported!"}
    | {"inverse_sqrt": "the inverse square root schedule is not supported!"}
    | {"piecewise_constant": "the piecewise constant schedule is not supported!"}
)
RATIOS = ("loraplus_unet_lr_ratio", "loraplus_lr_ratio", "loraplus_text_encoder_lr_ratio")
"""Of the learning rate of lora_up over that of lora_down; the first that is given counts."""
TIMESTEPS = {"uniform": "uniform", "none": "uniform", "sigma_sqrt": "uniform", "cosmap": "uniform"} | {
    "logit_normal": "logit_normal",
    "mode": "mode",
}
"""`weighting_scheme` -> how timesteps are sampled. The other half of it is a loss weight."""

OPTIONS: tuple[Rule, ...] = (
    # Model
    option("pretrained_model_name_or_path", "pretrained_model_name_or_path", path),
    read("network_module", "model_type", note="networks.lora and its variants are model_type = lora; without it, full"),
    option("network_dim", "lora_rank", whole, default=4),
    option("network_alpha", "lora_alpha", number, default=1),
    read("network_args", "lora_targets", "loraplus_lr_ratio", note="by default, all linear layers of the blocks, as there"),
    read("network_train_unet_only", "train_text_encoder", note="off by default there; those of SD and SDXL can be trained"),
    read(
        "text_encoder_lr",
        "text_encoder_lr",
        "train_text_encoder",
        note="0 leaves them as they are; of several the first, as there",
    ),
    option("network_weights", "init_lora", path, note="rank and alpha of the file are those of the run"),
    option("network_dropout", "lora_dropout", number, note="at the input of the first matrix here, at its output there"),
    option("gradient_checkpointing", "gradient_checkpointing", switch),
    read("fp8_base", "base_model_precision", note="fp8-torchao: only the linear layers of the blocks are quantised"),
    read("fp8_base_unet", "base_model_precision", note="as fp8_base"),
    read("no_half_vae", "vae_dtype", note="fp32"),
    option("t5xxl_max_token_length", "tokenizer_max_length", whole),
    option("gemma2_max_token_length", "tokenizer_max_length", whole),
    option("qwen3_max_token_length", "tokenizer_max_length", whole),
    # Training
    option("output_dir", "output_dir", path),
    read("output_name", "output_dir", note="a run has a directory of its own here: output_dir/output_name"),
    option("seed", "seed", whole),
    read("max_train_steps", "max_train_steps", note="optimizer steps, as here; the default is 1600"),
    read("max_train_epochs", "num_train_epochs", note="overrides max_train_steps there; here it is the other way round"),
    option("train_batch_size", "train_batch_size", whole, note="images per GPU, as here; batch_size of a dataset overrides it"),
    option("gradient_accumulation_steps", "gradient_accumulation_steps", whole),
    read("full_bf16", "weights_dtype", note="bf16 where all weights train; those of an adapter are fp32 here"),
    option("mixed_precision", "mixed_precision", precision, "fp16 is auto: bf16 where the device has it", default="no"),
    read("learning_rate", "learning_rate", note="the default is 2e-6"),
    read("unet_lr", "learning_rate", note="overrides learning_rate"),
    read("optimizer_type", "optimizer", note="AdamW and Lion, their 8-bit and paged forms, Prodigy, Adafactor and SGD"),
    read("use_8bit_adam", "optimizer", note="adamw8bit"),
    read("optimizer_args", "adam_weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", note="others are listed"),
    read("lr_scheduler", "lr_scheduler", note="cosine_with_restarts only with one cycle, which is cosine"),
    read("lr_warmup_steps", "lr_warmup_steps", note="a number below 1, or with %, is a share of the run"),
    read("lr_decay_steps", "lr_decay_share", note="steps there, a share of the run here"),
    read("lr_scheduler_min_lr_ratio", "lr_end_ratio"),
    read("lr_scheduler_num_cycles", "lr_scheduler", note="only 1"),
    option("lr_scheduler_power", "lr_power", number),
    option("max_grad_norm", "max_grad_norm", number),
    read("fused_backward_pass", "release_gradients", "release_clip_norm", note="max_grad_norm limits each tensor there"),
    option("ddp_timeout", "process_group_timeout", minutes, note="minutes there, seconds here"),
    read("torch_compile", "dynamo_backend"),
    read("dynamo_backend", "dynamo_backend", note="only with torch_compile there", off=(*OFF, "no")),
    # Objective
    option("min_snr_gamma", "snr_gamma", number),
    read("v_parameterization", "prediction_type", note="v_prediction"),
    option("zero_terminal_snr", "rescale_betas_zero_snr", switch),
    option("loss_type", "loss_type", choice({"l2": "l2", "huber": "huber", "smooth_l1": "smooth_l1"}, fix="--loss_type=l2")),
    option("huber_c", "huber_c", number),
    read("masked_loss", "mask_floor", note="masks of conditioning_data_dir; mask_floor = 0 and mask_normalise = false"),
    read("huber_schedule", "huber_schedule", note="the default there is snr", off=(*OFF, "snr")),
    read("timestep_sampling", "timestep_distribution", "flow_schedule_shift", "flow_schedule_auto_shift", "flow_sigmoid_scale"),
    read("weighting_scheme", "timestep_distribution", "flow_weighting"),
    read("sigmoid_scale", "flow_sigmoid_scale"),
    read("logit_mean", "flow_sigmoid_mean"),
    read("logit_std", "flow_sigmoid_scale"),
    read("mode_scale", note="only 1.29", off=(*OFF, "1.29")),
    read("discrete_flow_shift", "flow_schedule_shift", note="the default there is 3 for Flux and 6 for Lumina"),
    read("training_shift", "flow_schedule_shift", note="SD 3"),
    read("guidance_scale", "flux_guidance_value", note="the default is 3.5 there and 1 here"),
    read("model_prediction_type", note="only raw; the default there is sigma_scaled for Flux", off=(*OFF, "raw")),
    # Data
    read("dataset_config", "datasets", note="the file is read too"),
    read("config_file", note="the file is read too"),
    read("train_data_dir", "datasets", note="each folder `10_name` in it becomes a dataset with 9 repeats"),
    option("caption_dropout_rate", "caption_dropout_probability", number, default=0.0),
    read("cache_latents", "vae_cache_disable", note="on by default here; off for random crops without it"),
    read("cache_latents_to_disk", "vae_cache_disable", note="as cache_latents"),
    # Checkpoints, samples, trackers
    option("save_every_n_steps", "checkpoint_step_interval", whole),
    read("save_last_n_steps", "checkpoints_total_limit", note="steps there, a number of checkpoints here"),
    read("save_last_n_epochs", "checkpoints_total_limit", note="with save_every_n_epochs"),
    option("sample_every_n_steps", "validation_step_interval", whole),
    read("sample_prompts", "validation_prompt", note="with the keys of prompts"),
    read("log_with", "report_to"),
    option("log_tracker_name", "tracker_project_name", text),
    option("sample_sampler", "validation_noise_scheduler", choice(SAMPLERS, fix="leave it out: the family has a default")),
    read("huggingface_repo_id", "push_to_hub", "push_checkpoints_to_hub", "hub_model_id"),
    read("huggingface_repo_visibility", "hub_private", note="private by default, as there"),
    *no_effect("""
        - torch's attention is always used | xformers sdpa mem_eff_attn flash_attn split_attn attn_mode
        - texts are encoded once and cached by default | cache_text_encoder_outputs cache_text_encoder_outputs_to_disk
          text_encoder_batch_size vae_batch_size skip_cache_check skip_latents_validity_check
        - reading data and memory are handled automatically | max_data_loader_n_workers persistent_data_loader_workers lowram
          highvram debug_dataset disable_mmap_load_safetensors ddp_gradient_as_bucket_view ddp_static_graph
          tokenizer_cache_dir num_cpu_threads_per_process dynamic_bucketing fused_optimizer_groups mem_eff_save vae_chunk_size
          vae_disable_cache
        - files for other tools are written by `smalti checkpoint export` | save_model_as save_precision no_metadata
          training_comment use_safetensors mem_eff_attn_save metadata_title metadata_author metadata_description
          metadata_license metadata_tags
        - every checkpoint holds the complete state, and the same command resumes it | save_state save_state_on_train_end
          save_last_n_epochs_state save_last_n_steps_state initial_epoch initial_step skip_until_initial_step
        - metrics are always written to events.jsonl | logging_dir log_prefix log_config wandb_run_name
        - only with regularisation images | prior_loss_weight
        - written by sd-scripts itself | output_config console_log_level console_log_file console_log_simple
        - only with an option that is listed itself | multires_noise_discount noise_offset_random_strength
          ip_noise_gamma_random_strength base_weights_multiplier
        - rank and alpha are always those of init_lora | dim_from_weights
        - exports are published, in the background | async_upload save_state_to_huggingface huggingface_repo_type
          huggingface_path_in_repo
    """),
    *unsupported("""
        - text encoders and VAE come from a pipeline, by default the one published for the model | clip_l clip_g t5xxl gemma2
          qwen3 llm_adapter_path t5_tokenizer_path ae vae | base_pipeline = "FOLDER" names another pipeline
        - both text encoders have one learning rate here | text_encoder_lr1 text_encoder_lr2 | text_encoder_lr
        - complete text encoders are not trained here | learning_rate_te learning_rate_te1 learning_rate_te2 train_text_encoder
        - text encoders are not trained alone | network_train_text_encoder_only | train_text_encoder trains them with the model
        - T5 is not trained here | train_t5xxl
        - offset noise and its relatives are not supported | noise_offset multires_noise_iterations ip_noise_gamma
          adaptive_noise_scale | leave it out; rescale_betas_zero_snr with v_prediction is the exact way to dark and bright
          images
        - there are no weights in fp16 here | full_fp16 | weights_dtype = "bf16" where all weights train; see docs/memory.md
        - all frozen blocks of a LoRA are streamed, or none | blocks_to_swap block_swap single_blocks_to_swap
          double_blocks_to_swap | stream_base = true for a LoRA, else fsdp_cpu_offload; see docs/memory.md
        - another option says it | cpu_offload_checkpointing unsloth_offload_checkpointing | offload_activations = true
        - another option says it | blockwise_fused_optimizers | release_gradients = true
        - intervals are in steps here | save_every_n_epochs save_n_epoch_ratio | --checkpoint_step_interval=N
        - intervals are in steps here | sample_every_n_epochs | --validation_step_interval=N
        - no images are sampled before the first step | sample_at_first
        - states of sd-scripts are not read | resume | start from the exported weights, or finish the run with sd-scripts
        - an adapter is not merged into the base | base_weights | `smalti checkpoint export --merge` writes such a base
        - max-norm scaling is not supported | scale_weight_norms
        - each loss weight of smalti is an option of its own: snr_gamma | debiased_estimation_loss
        - no such loss weight | scale_v_pred_loss_like_noise_pred v_pred_like_loss
        - prompts are read without weights | weighted_captions
        - prior preservation with a loss of its own weight is not supported | reg_data_dir | leave them out, or add the folder
          as a dataset of its own with is_regularisation_data
        - tables of kohya's fine-tuning method are not read | in_json | see docs/datasets.md
        - an own class of datasets is not supported | dataset_class
        - states of sd-scripts are not read | resume_from_huggingface
        - settings of a tracker are not read | log_tracker_config
        - validation uses a dataset of its own | validate_every_n_steps validate_every_n_epochs max_validation_steps | move
          images to a folder of their own, and add a dataset with dataset_type = "eval"
        - DeepSpeed has its own configuration | deepspeed zero_stage offload_optimizer_device offload_param_device
          zero3_init_flag | --deepspeed_config=FILE; `smalti deepspeed build` writes one
        - Python modules of the user are not loaded | lr_scheduler_type lr_scheduler_args
        - this schedule is not supported | lr_scheduler_timescale
        - text encoders are not trained with the whole model | stop_text_encoder_training
        - all layers have one learning rate | self_attn_lr cross_attn_lr mlp_lr mod_lr
        - the text conditioner is not trained | llm_adapter_lr
        - learning rates of single blocks are not supported | block_lr
    """),
    read("min_timestep", "timestep_min", note="of SD and SDXL, over 1000", off=(*OFF, 0)),
    read("max_timestep", "timestep_max", note="of SD and SDXL, over 1000", off=(*OFF, 1000)),
    *unsupported("- prompts have the length of the text encoder | max_token_length", off=(*OFF, 75, "75")),
    *unsupported("- the Huber losses have one threshold, huber_c | huber_scale", off=(*OFF, 1)),
    *unsupported("- the number of images that are left out is up to the dataset | dataset_repeats", off=(*OFF, 1, "1")),
    *unsupported("- captions have one length, qwen3_max_token_length | t5_max_token_length", off=(*OFF, 512, "512")),
    *unsupported("- pads are those of the tokenizer | no_token_padding"),
    read("model_type", "model_family", note="chroma", off=(*OFF, "flux")),
    read("v2", "model_family", note="sd2x"),
    read("clip_skip", "clip_skip", note="of SD, and 1 less here; others do not use it", off=(*OFF, 1, 2, "1", "2")),
    read("apply_t5_attn_mask", note="always of Chroma, and of no other family"),
    *secret("huggingface_token", "wandb_api_key"),
)

LAUNCHER: tuple[Rule, ...] = (
    *(option(name, name, whole) for name in ("num_processes", "num_machines", "machine_rank", "main_process_port")),
    option("main_process_ip", "main_process_ip", text),
    read("mixed_precision", note="the script has an option of this name, which overrides it there"),
    *no_effect("""
        - num_processes says it | multi_gpu
        - reading data and memory are handled automatically | num_cpu_threads_per_process
        - every module is started alike | m module same_network quiet
    """),
    *unsupported("- a launch of smalti has options of its own | * | `smalti train --help`; docs/accelerate.md"),
)
"""Flags of `accelerate launch`."""

DATASETS: tuple[Rule, ...] = (
    read("image_dir", "instance_data_dir", note="subfolders are read too here"),
    read("num_repeats", "repeats", note="repeats counts additional visits: N there is N-1 here"),
    read("class_tokens", "instance_prompt", note="there the caption of images without a caption file"),
    read("caption_extension", "datasets", note="the default there is .caption", off=(*OFF, ".txt")),
    read("caption_extention", "datasets", note="as caption_extension"),
    read("caption_prefix", "caption_prefix", note="stays in front when tags are shuffled here"),
    read("caption_suffix", "caption_suffix", note="stays at the end when tags are shuffled here"),
    read("shuffle_caption", "caption_shuffle", note="a few variants are encoded before training, unless texts are not cached"),
    read("keep_tokens", "caption_shuffle", note="position_start"),
    read("caption_separator", "caption_shuffle", note="split_on; a comma by default", off=(*OFF, ",")),
    read("caption_tag_dropout_rate", "caption_tag_dropout_rate"),
    read("flip_aug", "flip_probability", note="0.5"),
    read("alpha_mask", "alpha_mask"),
    read("conditioning_data_dir", "mask_path", note="with masked_loss"),
    read("resolution", "resolution", note="width and height become the square of equal area; the default is 512"),
    read("batch_size", "train_batch_size", note="one for all datasets here"),
    read("enable_bucket", "crop_aspect", note="off by default there: every image becomes a square"),
    read("bucket_reso_steps", "aspect_bucket_alignment", note="one for all datasets here; 64 by default"),
    read("random_crop", "crop_style"),
    read("skip_image_resolution", "minimum_image_size", note="smaller images are left out; equal ones are kept here"),
    read("caption_dropout_rate", "caption_dropout_probability", note="the option; a key of each dataset where they differ"),
    read("is_reg", note="left out; here `is_regularisation_data` trains towards the model without the adapter"),
    read("metadata_file", note="tables of kohya's fine-tuning method are not read"),
    *no_effect("""
        - sizes and captions are indexed automatically | cache_info
        - images are scaled with antialiasing | resize_interpolation
        - buckets follow from the resolution and the images | min_bucket_reso max_bucket_reso
        - only with token warm-up | token_warmup_min
        - only for networks with a multiplier of their own | network_multiplier custom_attributes*
    """),
    *unsupported("""
        - small images are scaled up to their bucket | bucket_no_upscale | minimum_image_size leaves them out
        - captions are used as they are | secondary_separator enable_wildcard keep_tokens_separator token_warmup_step
          caption_dropout_every_n_epochs | several lines in a caption file are several captions, of which each visit draws one
        - images are only mirrored | color_aug face_crop_aug_range | crop_style = 'random'
        - validation uses a dataset of its own | validation_split validation_seed | dataset_type = "eval"
    """),
)

PROMPTS: tuple[Rule, ...] = (
    read("prompt", "validation_prompt"),
    read("negative_prompt", "validation_negative_prompt", note="one for all prompts"),
    read("width", "validation_resolution", note="512 by default there"),
    read("height", "validation_resolution", note="512 by default there"),
    read("sample_steps", "validation_num_inference_steps", note="one for all prompts; 30, of Flux 20, by default there"),
    read("scale", "validation_guidance", "flux_true_cfg_scale", note="one for all prompts; 7.5, of Flux 1, by default there"),
    read("guidance_scale", "validation_guidance", note="of Flux; 3.5 by default there"),
    read("seed", "validation_seed", note="of the first prompt; it counts up here"),
    *unsupported("""
        - one option says it for all prompts | sample_sampler | validation_noise_scheduler
        - images are sampled as the pipeline does | cfg_trunc_ratio renorm_cfg flow_shift
        - control images are not supported | controlnet_image
    """),
)
ALL_OPTIONS = (*OPTIONS, *(rule for rule in DATASETS if rule.key not in {each.key for each in OPTIONS}))
"""On the command line, every key of a dataset is a default of all datasets."""
