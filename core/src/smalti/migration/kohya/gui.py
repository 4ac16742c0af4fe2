"""Presets of kohya's GUI: JSON files with every field of a form. They become options of the script that the GUI runs."""

from __future__ import annotations

from collections.abc import Mapping

from smalti.migration.kohya.tables import OPTIONS
from smalti.migration.rules import Found, place_of

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
_NAMES = {"optimizer": "optimizer_type", "max_resolution": "resolution"}
_UNSET: tuple[object, ...] = (None, "", 0, 0.0, "0", "None", "none", False)
"""How a form says that a field is not used."""
_OF_FLOW = frozenset(
    (
        *("ae", "clip_l", "clip_g", "t5xxl", "t5xxl_max_token_length", "guidance_scale", "timestep_sampling", "sigmoid_scale"),
        *("model_prediction_type", "discrete_flow_shift", "weighting_scheme", "logit_mean", "logit_std", "mode_scale"),
        *("training_shift", "blocks_to_swap", "apply_t5_attn_mask", "cpu_offload_checkpointing", "split_mode"),
    )
)
"""Fields of Flux and SD 3, which every preset has."""


def is_preset(content: Mapping[object, object]) -> bool:
    """Whether a table is a preset: it has fields that only the forms have."""
    keys = {str(key) for key in content}
    fields = {"epoch", "lr_warmup", "max_resolution", "model_list", "additional_parameters"}
    return "LoRA_type" in keys or len(fields & keys) > 1


def options_in(content: Mapping[str, object], file: str) -> tuple[dict[str, Found], str]:
    """The options that a preset gives to sd-scripts, and the script."""
    family = next((name for key, name in _FAMILIES if content.get(key) in (True, "True", "true")), "")
    network = content.get("LoRA_type")
    script = f"{family}_train" if family else "train"
    script = f"{script}_network.py" if network is not None else f"{script}.py" if family else "fine_tune.py"
    known = {rule.key for rule in OPTIONS}
    found = {
        _NAMES.get(key, key): Found(value=value, place=place_of(file, key))
        for key, value in content.items()
        if _NAMES.get(key, key) in known and value not in _UNSET and (family in ("flux", "sd3") or key not in _OF_FLOW)
    }
    found.pop("model_type", None)
    if network is not None:
        module = NETWORKS.get(str(network), str(network))
        found["network_module"] = Found(value=module, place=place_of(file, "LoRA_type"))
        words = [f"{key}={content[key]}" for key in _ARGUMENTS.get(str(network), ()) if content.get(key) not in _UNSET]
        words += ["train_blocks=single"] if network == "Flux1" and content.get("split_mode") not in _UNSET else []
        found["network_args"] = Found(value=words, place=place_of(file, "LoRA_type"))
        if content.get("text_encoder_lr") in _UNSET and content.get("unet_lr") not in _UNSET:
            found["network_train_unet_only"] = Found(value=True, place=place_of(file, "text_encoder_lr"))
    epochs = content.get("epoch")
    if "max_train_steps" not in found and "max_train_epochs" not in found and epochs not in _UNSET:
        found["max_train_epochs"] = Found(value=epochs, place=place_of(file, "epoch"))
    percent = content.get("lr_warmup")
    if "lr_warmup_steps" not in found and percent not in _UNSET:
        found["lr_warmup_steps"] = Found(value=f"{percent}%", place=place_of(file, "lr_warmup"))
    return found, script
