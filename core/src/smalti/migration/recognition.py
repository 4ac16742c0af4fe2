"""Whose file this is: by what it says, not by its name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smalti.errors import UserError
from smalti.migration import simpletuner
from smalti.migration.aitoolkit import tables as aitoolkit_tables
from smalti.migration.command_lines import commands_in
from smalti.migration.files import TABLES, Kind, Opened, open_file
from smalti.migration.kohya import tables as kohya_tables
from smalti.migration.kohya.gui import is_preset
from smalti.migration.onetrainer import tables as onetrainer_tables

Trainer = Literal["kohya", "aitoolkit", "onetrainer", "simpletuner", "smalti"]

NAMES: Mapping[str, str] = {
    "kohya": kohya_tables.NAME,
    "aitoolkit": aitoolkit_tables.NAME,
    "onetrainer": onetrainer_tables.NAME,
} | {"simpletuner": "SimpleTuner", "smalti": "smalti"}
IMPORTABLE: tuple[Trainer, ...] = ("kohya", "aitoolkit", "onetrainer", "simpletuner")
READABLE: tuple[Trainer, ...] = ("simpletuner", "smalti")
"""Trainers whose files `smalti train` reads as they are."""
_KINDS: Mapping[Kind, str] = {"options": "configuration", "datasets": "dataset file", "prompts": "file of prompts"}
_FEWEST = 2
"""Keys of one trainer that make a file one of it. One alone may be a mistake in a file of smalti."""


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """A file of a trainer, and what it describes."""

    trainer: Trainer
    kind: Kind

    def __str__(self) -> str:
        return f"a {_KINDS[self.kind]} of {NAMES[self.trainer]}"


def recognize(file: Opened) -> Recognized | None:
    """The trainer and the kind of a file; None if nothing in it says."""
    content = file.content
    if content is None and simpletuner.variables_in(file.text):
        return Recognized(trainer="simpletuner", kind="options")
    if content is None:
        known = (*kohya_tables.SCRIPTS, *kohya_tables.OTHER_SCRIPTS)
        return Recognized(trainer="kohya", kind="options") if any(c.script in known for c in commands_in(file.text)) else None
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
    if is_preset(content):
        return Recognized(trainer="kohya", kind="options")
    if _has_process(content):
        return Recognized(trainer="aitoolkit", kind="options")
    if str(content.get("model_type")) in _MODEL_TYPES or ("training_method" in keys and "base_model_name" in keys):
        return Recognized(trainer="onetrainer", kind="options")
    if _has_subsets(content):
        return Recognized(trainer="kohya", kind="datasets")
    if "model_family" in keys | inner:
        dashed = any(str(key).startswith("--") for key in content)
        return Recognized(trainer="simpletuner" if dashed else "smalti", kind="options")
    if len(SIGNS & (keys | inner)) >= _FEWEST:
        return Recognized(trainer="kohya", kind="options")
    return None


def _has_subsets(content: Mapping[object, object]) -> bool:
    datasets = content.get("datasets")
    return isinstance(datasets, list) and any(isinstance(each, Mapping) and "subsets" in each for each in datasets)


def _has_process(content: Mapping[object, object]) -> bool:
    config = content.get("config")
    processes = config.get("process") if isinstance(config, Mapping) else None
    return isinstance(processes, list) and bool(processes) and all(isinstance(each, Mapping) for each in processes)


_MODEL_TYPES = frozenset((*onetrainer_tables.FAMILIES, *onetrainer_tables.OTHER_MODELS))
"""Names of models in OneTrainer's spelling."""
SIGNS = frozenset(
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


def refuse_other_trainers(path: Path, wanted: Kind) -> None:
    """Raise UserError if a file is one of another trainer, or not one of `wanted`, with the command that helps.

    A file that cannot be read, or that nothing is known of, is left to its reader.
    """
    if path.suffix.lower() not in (*TABLES, ".sh", ".bat", ".cmd", ".ps1", ".txt", ".env"):
        return
    try:
        found = recognize(open_file(path))
    except UserError:
        return
    readable = found is not None and found.trainer in READABLE and path.suffix.lower() in TABLES
    if found is not None and not (readable and found.kind == wanted):
        raise _refusal(path, found, wanted)


def _refusal(path: Path, found: Recognized, wanted: Kind) -> UserError:
    name = shlex.quote(str(path))
    message = f"{path} is {found}"
    if found.trainer not in READABLE or path.suffix.lower() not in TABLES:
        fix = f"smalti config import {name} --to={shlex.quote(f'{path.stem}-smalti.toml')}"
        others = {"datasets": "of its options", "prompts": "of its options and datasets", "options": ""}[found.kind]
        return UserError(message, fix=f"{fix}{f' (give the files {others} too)' if others else ''}")
    if wanted == "options":
        return UserError(message, fix=f"smalti train CONFIG --data_backend_config={name}")
    fix = f"smalti train {name}; --data_backend_config names a JSON file with a list of datasets"
    return UserError(message, fix=fix)
