"""What a run starts from: a whole pipeline; or the trained model alone, a file or a folder, beside a base pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from smalti import UserError
from smalti.models import is_dry_run
from smalti.system import load_json, read_regular
from smalti_diffusers.sources.components import Components, Replacement
from smalti_diffusers.sources.conversion import (
    ConvertedWeights,
    convert_encoder,
    convert_model,
    convert_vae,
    holds,
    tensors_of_model,
)
from smalti_diffusers.sources.location import (
    fetch_model,
    fetch_weights,
    find_file,
    find_folder,
    has_weights,
    index_of,
    small_files,
)
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.weight_files import folder_weights

_OF_ADAPTERS = re.compile(r"\.(lora_|lokr_|hada_)")
"""In the names of tensors."""
_FAMILIES = {
    "v2": "sd2x",
    "xl_base": "sdxl",
    "sd3": "sd3",
    "sd35_medium": "sd3",
    "sd35_large": "sd3",
    "flux-dev": "flux",
    "flux-schnell": "flux",
    "flux-2-dev": "flux2",
    "auraflow": "auraflow",
    "chroma": "chroma",
    "cosmos-2.0-t2i-2B": "cosmos",
    "cosmos-2.0-t2i-14B": "cosmos",
    "hidream": "hidream",
    "krea2": "krea2",
    "qwen-image-2.1": "qwen_image21",
    "lumina2": "lumina2",
    "sana": "sana",
    "z-image-turbo": "z_image",
}
"""The families of the models that diffusers recognises in single files."""
_PART = re.compile(r"first_stage_model|vae(?=\.)|text_encoders\.[^.]+|conditioner\.embedders\.\d+|cond_stage_model|model_ema")
"""Beginnings of the names of other parts than the trained model."""
_CONDITIONER = "llm_adapter."
_UNKNOWN = "v1"
"""What diffusers takes for Stable Diffusion 1 is anything that it does not recognise."""


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder with the trained model alone: `config.json` and its weights."""

    path: Path
    config: Mapping[str, object]


Alone = ModelFile | ModelFolder
"""The trained model without the other parts of its pipeline."""


def model_alone(name: str, part: str, revision: str | None, variant: str | None) -> Alone | None:
    """The trained model at a local path or on the hub; None for a pipeline. `part` is its name in a pipeline.

    Raises UserError for a file of another format.
    """
    if (file := find_file(name, revision)) is not None:
        return ModelFile(file)
    folder = small_files(name, revision)
    if index_of(folder) is not None:
        return None
    for place in ("", part):
        config = folder / place / "config.json"
        if config.is_file():
            if not is_dry_run():
                fetch_model(name, folder, place, variant)
                folder_weights(config.parent, variant)  # raises if there are none
            return ModelFolder(path=config.parent, config=load_json(read_regular(config)))
    return None


def model_type(file: ModelFile) -> str | None:
    """What diffusers takes a file for, by names and shapes; None if it cannot tell."""
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type

    try:
        infer = cast("Callable[[Mapping[str, Tensor]], str]", infer_diffusers_model_type)
        kind = infer({**file.tensors, **tensors_of_model(file)})
    except (KeyError, IndexError, UnboundLocalError):  # a size that it does not know leaves its variable unset
        return None
    return None if kind == _UNKNOWN else kind


def check_family(file: ModelFile, family: str) -> None:
    """Raises UserError for a file that is evidently a model of another family, or of none, or an adapter."""
    if any(name.startswith("lora_") or _OF_ADAPTERS.search(name) for name in file.tensors):
        raise UserError(f"{file} is an adapter, not a model", fix="name the model; --init_lora=FILE starts from an adapter")
    kind = model_type(file)
    known = None if kind is None else _FAMILIES.get(kind)
    if known == "cosmos":  # whose transformer Anima has, beside a conditioner that is not in every file
        known = "anima" if family == "anima" or any(_CONDITIONER in name for name in file.tensors) else known
    if kind is None or known == family:
        return
    if known is not None:
        raise UserError(f"{file} is a model of {known}, not of {family}", fix=f"--model_family={known}")
    raise UserError(f"{file} is not a model of {family}: diffusers recognises it as '{kind}'", fix="name another file")


def published_pipeline(file: ModelFile) -> str | None:
    """The hub id of the pipeline that diffusers takes for the one of this file; None if it does not recognise the file."""
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS

    kind = model_type(file)
    return None if kind is None else DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]


def open_pipeline(name: str, revision: str | None, variant: str | None) -> Components:
    """A whole pipeline, with all weights on this machine; without them in a dry run."""
    folder = find_folder(name, revision)
    return Components(folder, variant=variant, missing=_missing(name, folder, variant))


def open_beside_base(alone: Alone, part: str, base: str, revision: str | None, variant: str | None) -> Components:
    """The trained model with the other parts of a base pipeline, except for those that its file has too.

    Raises UserError where the model does not fit the base: its configuration is that of the base, if a file brings none.
    """
    try:
        folder = find_folder(base, revision)
        bare = Components(folder, variant=variant)
        replaced = _of_file(alone, bare, part) if isinstance(alone, ModelFile) else _of_folder(alone, bare, part, variant)
        missing = _missing(base, folder, variant, without=replaced)
    except UserError as error:
        if base in error.message:
            link = "which " if error.message.startswith(f"{base} ") else "where "
            reason = link + error.message.removeprefix(f"{base} ")
            message = f"{alone.path} is one part of a pipeline; the others come from {base}, {reason}"
            raise UserError(message, fix=f"{error.fix}; or --base_pipeline=FOLDER") from error
        raise
    scheduler = alone.scheduler if isinstance(alone, ModelFile) else None
    return Components(folder, replaced, variant=variant, scheduler=scheduler, missing=missing)


def _missing(name: str, folder: Path, variant: str | None, without: Collection[str] = ()) -> str:
    """Fetch the weights. A dry run fetches none: it gets the hub id that they are to be fetched from, "" if they are here."""
    if is_dry_run(missing=True):
        return "" if has_weights(name, folder, variant, without) else name
    fetch_weights(name, folder, variant, without)
    return ""


def unused_parts(file: ModelFile, components: Components) -> tuple[str, ...]:
    """Parts of the file that the base pipeline's are taken for, by the beginnings of their names."""
    weights = [replacement.weights for replacement in components.replaced.values()]
    used = set().union(*(each.sources() for each in weights if isinstance(each, ConvertedWeights)))
    parts: dict[str, bool] = {}
    for name in file.tensors:
        if match := _PART.match(name):
            parts[match[0]] = parts.get(match[0], False) or name in used
    return tuple(part for part, is_used in parts.items() if not is_used)


def _of_file(file: ModelFile, base: Components, part: str) -> dict[str, Replacement]:
    """The parts that a file has, by name."""
    with torch.device("meta"):
        model = base.build(part)
    found = {part: Replacement(weights=convert_model(file, model, base.config(part)))}
    for other in base.models():
        if other == part or not holds(file, other):
            continue
        with torch.device("meta"):
            model = base.build(other)
        weights = convert_vae(file, model, base.config(other)) if other == "vae" else convert_encoder(file, other, model)
        if weights is not None:
            found[other] = Replacement(weights=weights)
    return found


def _of_folder(folder: ModelFolder, base: Components, part: str, variant: str | None) -> dict[str, Replacement]:
    kind = folder.config.get("_class_name")
    if kind != base.kind(part):
        raise UserError(
            f"{folder.path} holds a {kind}, and {part} of {base.folder} is a {base.kind(part)}",
            fix="check --model_family and --base_pipeline",
        )
    return {part: Replacement(weights=folder_weights(folder.path, variant), config=folder.config)}


def shape_of(file: ModelFile, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor of the trained model, by its name without a prefix; None if it is not there."""
    tensor: Tensor | None = tensors_of_model(file).get(name)
    return None if tensor is None else tuple(tensor.shape)
