"""Whose configuration file this is: by what it says, not by its name. Another package converts those of other trainers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smalti.config.files import parse_value, read_text
from smalti.config.known_packages import package_of
from smalti.errors import UserError

Kind = Literal["options", "datasets", "prompts"]
Trainer = Literal["kohya", "aitoolkit", "onetrainer", "simpletuner", "smalti"]

TABLES = (".toml", ".json", ".yaml", ".yml")
NAMES: Mapping[Trainer, str] = {
    "kohya": "kohya's sd-scripts",
    "aitoolkit": "ai-toolkit",
    "onetrainer": "OneTrainer",
    "simpletuner": "SimpleTuner",
    "smalti": "smalti",
}
_READABLE: tuple[Trainer, ...] = ("simpletuner", "smalti")
"""Trainers whose files `smalti train` reads as they are."""
_KINDS: Mapping[Kind, str] = {"options": "configuration", "datasets": "dataset file", "prompts": "file of prompts"}
_FEWEST = 2
"""Keys of one trainer that make a file one of it. One alone may be a mistake in a file of smalti."""
_KOHYA_SCRIPT = re.compile(
    r"^(?!\s*(?:#|::|@?(?i:rem)\b))(?:.*[\s\"'/\\])?(?:(?:sdxl|flux|sd3|lumina|anima|hunyuan_image)_train(?:_network)?|train_network"
    r"|train_db|fine_tune|(?:sdxl_)?train_(?:leco|textual_inversion)|train_controlnet|(?:sdxl_|flux_)?train_control_net(?:_lllite)?"
    r")\.py(?=[\s\"']|$)",
    re.MULTILINE,
)
"""A line that runs a script of sd-scripts."""
_ENVIRONMENT = re.compile(
    r"^\s*(?:export\s+)?(MODEL_(?:FAMILY|TYPE|NAME)|DATALOADER_CONFIG|TRAINER_(?:EXTRA_ARGS|DYNAMO_BACKEND)|RESUME_CHECKPOINT"
    r"|TRAINING_(?:SEED|NUM_PROCESSES|NUM_MACHINES|DYNAMO_BACKEND)|MINIMUM_RESOLUTION|PUSH_CHECKPOINTS|MAX_NUM_STEPS|NUM_EPOCHS"
    r"|CHECKPOINTING_LIMIT|HUB_MODEL_NAME|USE_GRADIENT_CHECKPOINTING|LR_SCHEDULE)\+?=",
    re.MULTILINE,
)
"""A variable that only a config.env of SimpleTuner sets."""
_ONETRAINER_MODEL = re.compile(r"[A-Z]+(_[A-Z]+)*(_[0-9]+)*(_[A-Z]+)*")
KOHYA_KEYS = frozenset(
    (
        *("network_module", "network_dim", "network_alpha", "network_args", "network_train_unet_only", "unet_lr"),
        *("dataset_config", "train_data_dir", "reg_data_dir", "in_json", "caption_extension", "keep_tokens", "shuffle_caption"),
        *("optimizer_type", "optimizer_args", "max_train_epochs", "min_snr_gamma", "noise_offset", "v_parameterization"),
        *("save_every_n_epochs", "save_every_n_steps", "save_model_as", "output_name", "sample_every_n_epochs"),
        *("sample_every_n_steps", "cache_latents", "cache_latents_to_disk", "enable_bucket", "bucket_reso_steps"),
        *("max_data_loader_n_workers", "clip_l", "t5xxl", "gemma2", "full_bf16", "fp8_base", "blocks_to_swap"),
        *("discrete_flow_shift", "model_prediction_type", "timestep_sampling", "prior_loss_weight", "max_token_length"),
    )
)
"""Keys that only sd-scripts has."""
_KOHYA_FORMS = frozenset(("epoch", "lr_warmup", "max_resolution", "model_list", "additional_parameters"))
"""Fields that only the forms of its GUI have."""


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """A file of a trainer, and what it describes."""

    trainer: Trainer
    kind: Kind

    def __str__(self) -> str:
        return f"a {_KINDS[self.kind]} of {NAMES[self.trainer]}"


def recognize(text: str, content: object) -> Recognized | None:
    """The trainer and the kind of a file; None if nothing in it says. `content` is None for a text."""
    if content is None and len(set(_ENVIRONMENT.findall(text))) >= _FEWEST:
        return Recognized(trainer="simpletuner", kind="options")
    if content is None:
        return Recognized(trainer="kohya", kind="options") if _KOHYA_SCRIPT.search(text) else None
    if isinstance(content, list):
        return _list(content)
    return _mapping(content) if isinstance(content, Mapping) else None


def _list(content: list[object]) -> Recognized | None:
    """A list is one of datasets or of prompts."""
    rows = [row for row in content if isinstance(row, Mapping)]
    if not rows or len(rows) < len(content):
        return None
    if all("id" in row and {"type", "dataset_type", "instance_data_dir", "cache_dir"} & row.keys() for row in rows):
        return Recognized(trainer="simpletuner", kind="datasets")
    if all("path" in row and {"text", "image", "balancing", "enabled"} & row.keys() for row in rows):
        return Recognized(trainer="onetrainer", kind="datasets")
    if all("prompt" in row and {"diffusion_steps", "cfg_scale", "random_seed"} & row.keys() for row in rows):
        return Recognized(trainer="onetrainer", kind="prompts")
    if all("prompt" in row for row in rows):
        return Recognized(trainer="kohya", kind="prompts")
    return None


def _mapping(content: Mapping[object, object]) -> Recognized | None:
    keys = {str(key).lstrip("-").replace("-", "_") for key in content}
    inner = {str(key) for value in content.values() if isinstance(value, Mapping) for key in value}
    if "LoRA_type" in content or len(_KOHYA_FORMS & content.keys()) >= _FEWEST:
        return Recognized(trainer="kohya", kind="options")
    if _has_process(content):
        return Recognized(trainer="aitoolkit", kind="options")
    if _is_onetrainers(content.get("model_type")) or {"training_method", "base_model_name"} <= keys:
        return Recognized(trainer="onetrainer", kind="options")
    if _has_subsets(content):
        return Recognized(trainer="kohya", kind="datasets")
    if "model_family" in keys | inner:
        dashed = any(str(key).startswith("--") for key in content)
        return Recognized(trainer="simpletuner" if dashed else "smalti", kind="options")
    if len(KOHYA_KEYS & (keys | inner)) >= _FEWEST:
        return Recognized(trainer="kohya", kind="options")
    return None


def _is_onetrainers(model_type: object) -> bool:
    """Whether it is one of OneTrainer's models, such as FLUX_DEV_1. Others have "full" and "lora" here, in any case."""
    word = str(model_type)
    return _ONETRAINER_MODEL.fullmatch(word) is not None and word not in ("FULL", "LORA")


def _has_subsets(content: Mapping[object, object]) -> bool:
    datasets = content.get("datasets")
    return isinstance(datasets, list) and any(isinstance(each, Mapping) and "subsets" in each for each in datasets)


def _has_process(content: Mapping[object, object]) -> bool:
    config = content.get("config")
    processes = config.get("process") if isinstance(config, Mapping) else None
    return isinstance(processes, list) and bool(processes) and all(isinstance(each, Mapping) for each in processes)


def refuse_other_trainers(path: Path, wanted: Kind) -> None:
    """Raise UserError if a file is one of another trainer, or not one of `wanted`, with the command that helps.

    A file that cannot be read, or that nothing is known of, is left to its reader.
    """
    is_table = path.suffix.lower() in TABLES
    if not is_table and path.suffix.lower() not in (".sh", ".bat", ".cmd", ".ps1", ".txt", ".env"):
        return
    try:
        text = read_text(path)
        found = recognize(text, parse_value(path, text) if is_table else None)
    except UserError:
        return
    readable = found is not None and found.trainer in _READABLE and is_table
    if found is not None and not (readable and found.kind == wanted):
        raise _refusal(path, found, wanted, readable)


def _refusal(path: Path, found: Recognized, wanted: Kind, readable: bool) -> UserError:
    name = shlex.quote(str(path))
    message = f"{path} is {found}"
    if not readable:
        package = package_of("commands", "config import")
        if package is not None and package.target:
            return package.error(f"{message}, which {package.distribution} converts")
        fix = f"smalti config import {name} --to={shlex.quote(f'{path.stem}-smalti.toml')}"
        others = {"datasets": "of its options", "prompts": "of its options and datasets", "options": ""}[found.kind]
        return UserError(message, fix=f"{fix}{f' (give the files {others} too)' if others else ''}")
    if wanted == "options":
        return UserError(message, fix=f"smalti train CONFIG --data_backend_config={name}")
    fix = f"smalti train {name}; --data_backend_config names a JSON file with a list of datasets"
    return UserError(message, fix=fix)
