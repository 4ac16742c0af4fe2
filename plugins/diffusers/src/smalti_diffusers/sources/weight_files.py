"""Which files of a folder hold a model's weights: plain files, shards with an index, and variants such as fp16.

Names are those that diffusers and transformers write: `model.safetensors`, `model-00001-of-00003.safetensors` with
`model.safetensors.index.json`, and for a variant `model.fp16.safetensors`, `model.fp16-00001-of-00003.safetensors` with
`model.safetensors.index.fp16.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti import UserError
from smalti.models import FolderWeights
from smalti.system import parse_json

AGAIN = "copy or download it again"
"""What to do about a damaged file."""
_SHARD = r"(?:-\d+-of-\d+)"
_WEIGHTS = re.compile(rf"([^.]+?){_SHARD}?(?:\.([^.]+?){_SHARD}?)?\.safetensors")
_INDEX = re.compile(r"[^.]+\.safetensors\.index(?:\.([^.]+))?\.json")


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files of one variant by name; `variant` is None for plain names. `index` is the name of their index, if any."""

    variant: str | None
    files: tuple[str, ...]
    index: str | None


def variant_of(name: str) -> str | None:
    """The variant that the name of a weight file or an index has: "fp16" for `model.fp16.safetensors`. None for plain names."""
    if found := _WEIGHTS.fullmatch(name):
        return found[2]
    found = _INDEX.fullmatch(name)
    return found[1] if found else None


def plain_name(name: str) -> str:
    """The name of a weight file or an index without its variant."""
    variant = variant_of(name)
    return name if variant is None else name.replace(f".{variant}", "", 1)


def weight_files(names: Iterable[str], variant: str | None = None) -> WeightFiles | None:
    """The weights among the file names of one folder; None if there are none.

    Those of `variant` where there are any, else plain ones, else those of the only variant. Raises UserError if there are
    several variants to choose from, or only others than the one that was asked for.
    """
    found: dict[str | None, list[str]] = {}
    for name in sorted(names):
        if _WEIGHTS.fullmatch(name) or _INDEX.fullmatch(name):
            found.setdefault(variant_of(name), []).append(name)
    if not found:
        return None
    variants = sorted(key for key in found if key is not None)
    chosen = variant if variant in found else None
    if chosen not in found:
        if variant is not None or len(variants) > 1:
            wanted = f"not in the variant {variant!r}" if variant is not None else "in no file without a variant"
            raise UserError(
                f"there are weights in the variants {', '.join(variants)}, and {wanted}", fix=f"--variant={variants[0]}"
            )
        (chosen,) = variants
    index = next((name for name in found[chosen] if name.endswith(".json")), None)
    return WeightFiles(variant=chosen, files=tuple(name for name in found[chosen] if not name.endswith(".json")), index=index)


def folder_weights(folder: Path, variant: str | None = None) -> FolderWeights:
    """The weights in a folder: the files of its index where there is one, else all of the variant.

    Raises UserError, which names the file, if there is nothing to read or a file is missing or damaged.
    """
    try:
        chosen = weight_files((each.name for each in folder.iterdir()), variant) if folder.is_dir() else None
    except UserError as error:
        raise UserError(f"{folder}: {error.message}", fix=error.fix) from None
    found = indexed_files(folder, chosen) if chosen is not None else ()
    if missing := [name for name in found if not (folder / name).is_file()]:
        raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names", fix=AGAIN)
    return FolderWeights(folder, [folder / name for name in found])


def indexed_files(folder: Path, chosen: WeightFiles) -> Sequence[str]:
    """The files that the index lists, where it is there, else those that were chosen by their names."""
    if chosen.index is not None and (folder / chosen.index).is_file():
        return sorted(set(weight_map(folder / chosen.index).values()))
    return chosen.files


def weight_map(index: Path) -> dict[str, str]:
    """The file name of each tensor that an index lists. Raises UserError for a damaged index."""
    try:
        body = parse_json(index.read_bytes())
    except ValueError as error:
        raise UserError(f"{index} is not valid JSON: {error}", fix=AGAIN) from error
    match body:
        case {"weight_map": dict(found)} if all(isinstance(file, str) for file in found.values()):
            return found
    raise UserError(f"{index} does not say in which files the weights are: it has no weight_map", fix=AGAIN)
