"""SimpleTuner's options of validation, checkpoints, trackers, publishing and the launch."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.conversions import base_model, prompt_library
from smalti_migrate.simpletuner.rules import Rule, ignored, refused, renamed, same

_NOT_PUBLISHED = "the package smalti-hub publishes runs, and it is not installed"
_EXPORT = "install smalti-hub, or set it to false and upload later what `smalti checkpoint export` writes"
_OWN_PROMPTS = "images are sampled for the prompts that are given"
_SKIP_LAYERS = "guidance is the same in all layers, in validation images"
_VIDEO = "it is for videos"
_SCRIPT = "write a plugin with the hook on_checkpoint, see docs/hooks.md"

RUN_KEYS: Mapping[str, Rule] = {
    # Validation
    "validation_disable": refused("images are sampled if there is a prompt", "remove validation_prompt", False),
    "validation_epoch_interval": refused("validation is counted in steps", "validation_step_interval=STEPS"),
    "validation_guidance_real": renamed("flux_true_cfg_scale", neutral=(1.0,)),
    "validation_no_cfg_until_timestep": ignored("guidance is the same in all steps, in validation images", 0, 2),
    "validation_guidance_skip_layers": ignored(_SKIP_LAYERS),
    "validation_guidance_skip_layers_start": ignored(_SKIP_LAYERS, 0.01),
    "validation_guidance_skip_layers_stop": ignored(_SKIP_LAYERS, 0.2),
    "validation_guidance_skip_scale": ignored(_SKIP_LAYERS, 2.8),
    "validation_prompt_library": same(
        convert=prompt_library,
        why="smalti brings no prompts of its own; a file of prompts here, as user_prompt_library there",
    ),
    "num_validation_images": refused(
        "there is one image for each prompt and size", "repeat the prompt: each has a seed of its own", 1
    ),
    "validation_randomize": refused("images can be compared only with the same seeds", "set it to false", False),
    "validation_seed_source": ignored("noise is made on the CPU, so images are the same on all devices", "cpu"),
    "validation_disable_unconditional": ignored(_OWN_PROMPTS, True),
    "validation_on_startup": renamed(
        "validation_base_model", "the model before training is sampled once, not at each start", neutral=(False,)
    ),
    "disable_benchmark": renamed("validation_base_model", convert=base_model),
    "validation_using_datasets": refused("images of the datasets are not used for validation", "set it to false", False),
    "inference_scheduler_timestep_spacing": ignored("the scheduler of the pipeline is used, in validation images", "trailing"),
    "validation_torch_compile": ignored("dynamo_backend compiles the model for training and validation", False),
    "validation_torch_compile_mode": ignored("dynamo_mode applies to training and validation"),
    "validation_multigpu": ignored("all ranks sample", "batch-parallel"),
    "validation_stitch_input_location": ignored("there are no input images"),
    "validation_lycoris_strength": ignored("adapter_strength of a prompt says it", 1.0),
    "validation_adapter_path": refused("validation images show the adapter that is trained", "remove it"),
    "validation_adapter_config": refused("validation images show the adapter that is trained", "remove it"),
    "validation_adapter_name": ignored("validation images show the adapter that is trained"),
    "validation_adapter_mode": ignored("validation images show the adapter that is trained"),
    "validation_preview": ignored("images are shown when they are complete", False),
    "validation_preview_steps": ignored("images are shown when they are complete", 1),
    "validation_method": refused("images are sampled by the run itself", _SCRIPT, "simpletuner-local"),
    "validation_external_script": refused("images are sampled by the run itself", _SCRIPT),
    "validation_external_background": ignored("images are sampled by the run itself", False),
    "validation_num_video_frames": ignored(_VIDEO),
    "validation_audio_only": ignored("it is for audio", False),
    "validation_lyrics": ignored("it is for audio"),
    "validation_audio_duration": ignored("it is for audio", 30.0),
    "framerate": ignored(_VIDEO),
    "enable_watermark": ignored("images have no watermark", False),
    "evaluation_type": ignored("no scores are computed; the loss is measured on eval datasets", "none"),
    "pretrained_evaluation_model_name_or_path": ignored("no scores are computed"),
    "eval_dataset_id": refused("all eval datasets are measured", "set disabled in the entries of the others"),
    "eval_timesteps": ignored("the loss is always measured at 5 noise levels", 5, 28),
    "eval_dataset_pooling": ignored("there is one evaluation loss for all eval datasets"),
    "eval_loss_disable": ignored("the loss is measured if there is an eval dataset", False),
    # Checkpoints
    "checkpoint_epoch_interval": refused("checkpoints are counted in steps", "checkpoint_step_interval=STEPS"),
    "checkpointing_rolling_steps": refused("there is one series of checkpoints", "checkpoint_step_interval=STEPS", 0),
    "checkpoints_rolling_total_limit": ignored("there is one series of checkpoints", 1),
    "checkpointing_use_tempdir": ignored("a checkpoint becomes visible when it is complete"),
    "delete_invalid_checkpoints": ignored("damaged checkpoints are reported and kept", False),
    "disk_low_script": refused("a run starts no scripts", _SCRIPT),
    "post_checkpoint_script": refused("a run starts no scripts", _SCRIPT),
    "post_upload_script": refused("a run starts no scripts", _SCRIPT),
    # Trackers
    "tracker_run_name": ignored("the run is named after output_dir"),
    "tracker_image_layout": ignored("trackers show images in their own way"),
    "logging_dir": ignored("logs are in output_dir"),
    # Publishing
    "push_to_hub": refused(_NOT_PUBLISHED, _EXPORT, False),
    "push_checkpoints_to_hub": refused(_NOT_PUBLISHED, _EXPORT, False),
    "push_to_hub_background": ignored("uploads never delay a step"),
    "hub_model_id": ignored(_NOT_PUBLISHED),
    "publishing_config": refused(
        "runs are published on the Hugging Face Hub only", "remove it, and upload what `smalti checkpoint export` writes"
    ),
    "modelspec_comment": ignored("files have no such field; edit the model card"),
    # Launch
    "local_rank": ignored("the launcher numbers the ranks"),
    "same_network": ignored("nodes reach each other directly", True),
    "accelerate_extra_args": refused(
        "flags of accelerate are options here", "num_processes, machine_rank, main_process_ip ..."
    ),
    "dynamo_use_regional_compilation": ignored("blocks are compiled one by one", True),
    "dynamo_fullgraph": ignored("blocks are compiled one by one", False),
    "dynamo_dynamic": ignored("each shape is compiled, up to 16", False),
    "find_unused_parameters": ignored("every parameter that trains has a gradient"),
    "i_know_what_i_am_doing": ignored("no option needs it"),
    "configs_dir": ignored("the configuration is the file that is given"),
    "merge_environment_config": ignored("the configuration is the file that is given"),
}

PREFIXES: Mapping[str, Rule] = {
    "ramtorch_": ignored("it is part of ramtorch"),
    "group_offload_": ignored("it is part of enable_group_offload"),
    "sdnq_": ignored("SDNQ is not supported"),
    "model_card_": ignored("the model card is a text file beside the export; edit it there"),
    "timestep_bias_": ignored("no timesteps are preferred"),
    "scheduled_sampling_": ignored("scheduled sampling is not supported"),
    "diff2flow_": ignored("a model keeps its own objective"),
    "distillation_": ignored("distillation is not supported"),
    "crepa_": ignored("CREPA is for videos"),
    "layersync_": ignored("LayerSync is not supported"),
    "twinflow_": ignored("TwinFlow is not supported"),
    "self_flow_": ignored("Self-Flow is not supported"),
    "self_transcendence_": ignored("Self-Transcendence is not supported"),
    "anyflow_": ignored("AnyFlow is not supported"),
    "diffusion_blocks_": ignored("Diffusion Blocks are not supported"),
    "flow_dpo_": ignored("preferences are trained with dpo_beta, and rejected_path of a dataset, here"),
    "repa_": ignored("representation alignment is not supported"),
    "irepa_": ignored("representation alignment is not supported"),
    "internal_guidance_": ignored("internal guidance is not supported"),
    "mixflow_": ignored("MixFlow is not supported"),
    "nextlat_": ignored("NextLat is not supported"),
    "lyrics_embedder_": ignored("it is for audio"),
    "acestep_": ignored("it is for audio"),
    "cosmos_": ignored("it is for another model of Cosmos"),
    "cosmos3_": ignored("the model family is not supported"),
    "hidream_": ignored("no loss balances the experts of HiDream-I1"),
    "ideogram_": ignored("options of Ideogram are not supported"),
    "kandinsky_": ignored("the model family is not supported"),
    "ltx_": ignored(_VIDEO),
    "ltx2_": ignored(_VIDEO),
    "ltxvideo_": ignored(_VIDEO),
    "wan_": ignored(_VIDEO),
    "s2v_": ignored(_VIDEO),
    "pixart_": ignored("stages of PixArt are not supported"),
}
"""Beginnings of names, for options that no table lists: those of one feature. `..._enabled` is refused if it is on."""
