"""What the `deepspeed_config` of a user's Accelerate YAML means here. Imports no torch, no Accelerate, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from smalti import Problem, Translation
from smalti.config import Schema
from smalti_deepspeed.parsing import is_open, section

_IDLE = {
    "zero3_init_flag": (True, "the model is never whole on a rank in stage 3"),
    "zero3_save_16bit_model": (True, "checkpoints hold the weights in fp32, and `smalti checkpoint export` writes others"),
    "deepspeed_hostfile": (None, "each node starts its own ranks with smalti train"),
    "deepspeed_exclusion_filter": (None, "each node starts its own ranks with smalti train"),
    "deepspeed_inclusion_filter": (None, "each node starts its own ranks with smalti train"),
    "deepspeed_moe_layer_cls_names": (None, "no model family has such layers"),
}
"""Keys without counterpart: the value that asks for something else than what happens (None: any), and what happens."""
_LAUNCHER = "deepspeed_multinode_launcher"
_OFFLOAD = tuple(f"offload_{what}_{key}" for what in ("optimizer", "param") for key in ("device", "nvme_path"))
_PLAIN = {"gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm"}
KEYS = frozenset(("zero_stage", "deepspeed_config_file", _LAUNCHER, *_OFFLOAD, *_PLAIN, *_IDLE))
STAGE = 2
"""Accelerate's own, where the file names none."""


def translate(values: Mapping[str, object], schema: Schema) -> Translation:
    """Whatever the file says about DeepSpeed: as options, as notices, or as problems."""
    content = {key: value for key, value in section(values, "deepspeed_config").items() if value is not None}
    if values.get("distributed_type") != "DEEPSPEED":
        notices = [("deepspeed_config", "has no effect unless distributed_type is DEEPSPEED")] if content else []
        return Translation(values={"deepspeed_config": ("deepspeed_config", None)}, notices=notices)
    said: dict[str, tuple[str, object]] = {}
    for key, option in _PLAIN.items():
        if not is_open(content.get(key)):
            said[option] = (f"deepspeed_config.{key}", content[key])
    if file := content.get("deepspeed_config_file"):
        said["deepspeed_config"] = ("deepspeed_config.deepspeed_config_file", file)
    else:
        said["deepspeed_config"] = ("deepspeed_config", _document(content))
    notices = [*_idle(content), *_beside_file(content)]
    return Translation(values=said, notices=notices, problems=_unknown(content))


def _document(content: Mapping[str, object]) -> dict[str, object]:
    stage = content.get("zero_stage", STAGE)
    zero: dict[str, object] = {"stage": int(str(stage)) if str(stage).isdecimal() else stage}
    for name in ("offload_optimizer", "offload_param"):
        device = str(content.get(f"{name}_device", "none")).lower()
        if device == "none":
            continue
        zero[name] = {"device": device}
        if device == "nvme" and not is_open(path := content.get(f"{name}_nvme_path")):
            zero[name] = {"device": device, "nvme_path": path}
    return {"zero_optimization": zero}


def _idle(content: Mapping[str, object]) -> list[tuple[str, str]]:
    found = [
        (f"deepspeed_config.{key}", f"has no effect: {instead}")
        for key, (idle, instead) in _IDLE.items()
        if key in content and (idle is None or str(content[key]).lower() == str(idle).lower())
    ]
    if content.get(_LAUNCHER, "standard") != "standard":
        found.append((f"deepspeed_config.{_LAUNCHER}", "has no effect: each node starts its own ranks with smalti train"))
    return found


def _beside_file(content: Mapping[str, object]) -> list[tuple[str, str]]:
    if not content.get("deepspeed_config_file"):
        return []
    beside = [key for key in ("zero_stage", *_OFFLOAD) if key in content]
    return [(f"deepspeed_config.{key}", "has no effect beside deepspeed_config_file") for key in beside]


def _unknown(content: Mapping[str, object]) -> list[Problem]:
    problems = []
    for key in content:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1, cutoff=0.8)
            fix = f"did you mean {near[0]}?" if near else "DeepSpeed's own settings go into a deepspeed_config_file"
            problems.append(Problem(message="unknown key", where=f"deepspeed_config.{key}", fix=fix))
    return problems
