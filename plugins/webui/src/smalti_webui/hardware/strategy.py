"""The one choice of how a run is distributed: None, FSDP2 or DeepSpeed, over the options of a draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["none", "fsdp2", "deepspeed", "both"]
TITLES: Mapping[str, str] = {"none": "None", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
BOTH = "FSDP and DeepSpeed cannot be enabled simultaneously."
FSDP_OPTIONS = (
    "fsdp_version",
    "fsdp_state_dict_type",
    "fsdp_auto_wrap_policy",
    "fsdp_min_num_params",
    "fsdp_reshard_after_forward",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_cpu_offload",
    "fsdp_limit_all_gathers",
    "fsdp_activation_checkpointing",
    "fsdp_transformer_layer_cls_to_wrap",
)
"""The options of the card, in its order. The others of the section are under "More"."""
CONTEXT_OPTIONS = ("context_parallel_size", "context_parallel_comm_strategy")
RANK_OPTIONS = ("num_processes", "num_machines", "mixed_precision", "dynamo_backend")
BLOCK_CLASSES = "fsdp_transformer_layer_cls_to_wrap"
_OFF = ("", "0", "false", "no", "none", "null", "off")
_ENABLE, _CONTEXT, _DOCUMENT = "fsdp_enable", "context_parallel_size", "deepspeed_config"


def is_set(value: object) -> bool:
    """Whether the value of an option, in any spelling, switches something on."""
    return value is not None and str(value).strip().lower() not in _OFF


def mode_of(values: Mapping[str, object]) -> Mode:
    """What a draft asks for. "both" only if it was written elsewhere: the page offers one choice."""
    fsdp = is_set(values.get(_ENABLE)) or str(values.get(_CONTEXT) or "1").strip() not in ("0", "1")
    deepspeed = is_set(values.get(_DOCUMENT))
    if fsdp and deepspeed:
        return "both"
    return "fsdp2" if fsdp else "deepspeed" if deepspeed else "none"


def changes_for(mode: str, values: Mapping[str, object], document: str | None = None) -> dict[str, object]:
    """The options that make a draft ask for `mode`; None removes one. `document` is the DeepSpeed configuration to take.

    Settings of FSDP remain, so that a later choice of FSDP2 finds them.
    """
    changes: dict[str, object] = {}
    if mode != "fsdp2":
        changes |= {name: None for name in (_ENABLE, *CONTEXT_OPTIONS, "fsdp_offload_params") if name in values}
    elif not is_set(values.get(_ENABLE)):
        changes[_ENABLE] = True
    if mode != "deepspeed":
        changes |= {name: None for name in (_DOCUMENT, "offload_param_path") if name in values}
    elif not is_set(values.get(_DOCUMENT)):
        changes[_DOCUMENT] = document or '{"zero_optimization": {"stage": 2}}'
    return changes


def changes_for_plan(
    options: Mapping[str, object], values: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """The options that make a draft a planned way to train: its own ones, without those of other strategies.

    What is a default is removed from the draft.
    """
    own = {name: value for name, value in options.items() if value is not None and value != defaults.get(name)}
    others = changes_for(mode_of(own), {**values, **own})
    removed = [name for name in values if name in options or (name.startswith("fsdp_") and name != BLOCK_CLASSES)]
    return {**dict.fromkeys(removed), **others, **own}
