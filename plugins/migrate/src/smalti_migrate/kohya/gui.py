"""Presets of kohya's GUI: JSON files with every field of a form. They become options of the script that the GUI runs."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.command_lines import options_of, words_of
from smalti_migrate.converters import whole
from smalti_migrate.kohya.tables import ALL_OPTIONS, NAME, RATIOS
from smalti_migrate.rules import (
    Found,
    Imported,
    Rule,
    Values,
    convert_options,
    no_effect,
    option,
    place_of,
    read,
    unsupported,
)

NETWORKS = {
    **dict.fromkeys(("Standard", "Kohya LoCon"), "networks.lora"),
    "Flux1": "networks.lora_flux",
    "SD3": "networks.lora_sd3",
}
"""`LoRA_type` -> the network module. All others are not plain LoRA."""
_FAMILIES = (("flux1_checkbox", "flux"), ("sd3_checkbox", "sd3"), ("sdxl", "sdxl"), ("sdxl_checkbox", "sdxl"))
_DROPOUTS = ("rank_dropout", "module_dropout")
_BLOCKS = (*_DROPOUTS, "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_dims", "block_alphas", "conv_block_dims")
_ARGUMENTS = {
    "Standard": _BLOCKS,
    "Kohya LoCon": (*_BLOCKS, "conv_dim", "conv_alpha"),
    "Flux1": (
        *(*_DROPOUTS, "img_attn_dim", "img_mlp_dim", "img_mod_dim", "txt_attn_dim", "txt_mlp_dim", "txt_mod_dim"),
        *("single_dim", "single_mod_dim", "in_dims", "train_double_block_indices", "train_single_block_indices"),
        *("split_qkv", "train_t5xxl"),
    ),
}
"""`LoRA_type` -> the fields that become arguments of the network. split_mode is the argument train_blocks=single."""
_NAMES = {"optimizer": "optimizer_type", "max_resolution": "resolution", "sdxl_no_half_vae": "no_half_vae"} | {
    "lora_network_weights": "network_weights"
}
_TRUE = (True, "True", "true")
_OF_NETWORKS = " ".join(dict.fromkeys(key for keys in (*_ARGUMENTS.values(), RATIOS) for key in keys))
_UNSET: tuple[object, ...] = (None, "", 0, 0.0, "0", "None", "none", False)
"""How a form says that a field is not used."""
_OF_FLOW = no_effect("""
        - only for Flux and SD 3 | ae clip_l clip_g t5xxl t5xxl_max_token_length guidance_scale timestep_sampling
          sigmoid_scale model_prediction_type discrete_flow_shift weighting_scheme logit_mean logit_std mode_scale
          training_shift blocks_to_swap apply_t5_attn_mask cpu_offload_checkpointing split_mode
    """)
"""Fields that every preset has."""
FIELDS: tuple[Rule, ...] = (
    read("LoRA_type", "model_type", note="Standard, Kohya LoCon, Flux1 or SD3; without it, full"),
    *(read(key, "model_family") for key in ("sdxl", "sdxl_checkbox", "flux1_checkbox", "sd3_checkbox")),
    *(read(key, note=f"as {name}") for key, name in _NAMES.items()),
    read("epoch", "num_train_epochs", note="if neither max_train_epochs nor max_train_steps is set"),
    read("lr_warmup", "lr_warmup_steps", note="percent of the run, if lr_warmup_steps is not set"),
    read("additional_parameters", note="read as a command line, which overrides the other fields"),
    *(option(name, name, whole) for name in ("num_processes", "num_machines", "main_process_port")),
    *no_effect(f"- only with a network that has such an argument | split_mode {_OF_NETWORKS}"),
    *no_effect("""
        - num_processes says it | multi_gpu
        - only with a network that is listed itself | LyCORIS_preset bypass_mode constrain decompose_both dora_wd factor
          full_matrix rank_dropout_scale rescaled train_norm train_on_input unit use_cp use_scalar use_tucker
          block_lr_zero_threshold conv_dims conv_alphas
        - only with a network that has such an argument | conv_block_alphas train_blocks
        - only with noise that is listed itself | noise_offset_type
        - the GUI does not pass it on for an adapter | stop_text_encoder_training stop_text_encoder_training_pct
        - texts are encoded once and cached by default | sdxl_cache_text_encoder_outputs* flux1_cache_text_* sd3_cache_text_*
          sd3_text_encoder_batch_size
        - devices and memory are handled automatically | lowvram t5xxl_device t5xxl_dtype
        - only with torch_compile | dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
        - files for other tools are written by `smalti checkpoint export` | save_clip save_t5xxl save_as_bool
        - written by its forms | model_list model_type no_token_padding use_latent_files
        - only to prepare the tables of kohya's fine-tuning method | batch_size create_* full_path generate_*
          caption_metadata_filename latent_metadata_filename
    """),
    *unsupported("""
        - tables of kohya's fine-tuning method are not read | image_folder train_dir | see docs/datasets.md
        - a launch of smalti has options of its own | gpu_ids extra_accelerate_launch_args
    """),
)
"""What a preset has beside options of sd-scripts."""


def is_preset(content: Mapping[object, object]) -> bool:
    """Whether a table is a preset: it has fields that only the forms have."""
    keys = {str(key) for key in content}
    fields = {"epoch", "lr_warmup", "max_resolution", "model_list", "additional_parameters"}
    return "LoRA_type" in keys or len(fields & keys) > 1


def options_in(content: Mapping[str, object], file: str, result: Imported) -> tuple[Values, str]:
    """The options that a preset gives to sd-scripts, and the script."""
    family = next((name for key, name in _FAMILIES if content.get(key) in _TRUE), "")
    script = f"{family}_train" if family else "train"
    network = content.get("LoRA_type") or None
    script = f"{script}_network.py" if network is not None else f"{script}.py" if family else "fine_tune.py"
    rules = [*(() if family in ("flux", "sd3") else _OF_FLOW), *FIELDS, *ALL_OPTIONS]
    kinds = {rule.key: rule for rule in reversed(rules)}
    fields = result.table(list(kinds.values()), {key: value for key, value in content.items() if value not in _UNSET}, file)
    convert_options([rule for rule in FIELDS if rule.kind == "option"], fields, result)
    known = {rule.key for rule in ALL_OPTIONS}
    used = {_NAMES.get(key, key): given for key, given in fields.items() if key not in kinds or kinds[key].kind != "no effect"}
    found = Values({key: given for key, given in used.items() if key in known}, NAME)
    result.settled += [fields[key].place for key, name in _FAMILIES if name == family and content.get(key) in _TRUE]
    if network is not None:
        _network(str(network), fields, found, result)
    if "max_train_steps" not in found and "max_train_epochs" not in found and "epoch" in fields:
        found["max_train_epochs"] = fields["epoch"]
    if "lr_warmup_steps" not in found and "lr_warmup" in fields:
        found["lr_warmup_steps"] = Found(value=f"{fields['lr_warmup'].value}%", place=fields["lr_warmup"].place)
    if "additional_parameters" in fields:
        more, place = fields["additional_parameters"], place_of(file, "additional_parameters --")
        words, _ = words_of(str(more.value), {})
        result.settled += [more.place] if words[0].startswith("-") else []
        found = Values({key: Found(value=value, place=f"{place}{key}") for key, value in options_of(words).items()}, NAME).over(
            found
        )
    return found, script


def _network(network: str, fields: Values, found: Values, result: Imported) -> None:
    """The network and its arguments, and whether text encoders are trained too."""
    place = fields["LoRA_type"].place
    words = [f"{key}={fields[key].value}" for key in (*_ARGUMENTS.get(network, ()), *RATIOS) if key in fields]
    words += ["train_blocks=single"] if network == "Flux1" and "split_mode" in fields else []
    found["network_module"] = Found(value=NETWORKS.get(network, network), place=place)
    found["network_args"] = Found(value=words, place=place)
    if "text_encoder_lr" not in fields and "unet_lr" in fields:
        found["network_train_unet_only"] = Found(value=True, place=f"{place}; there is no text_encoder_lr")
