"""A copy of the complete weights, in the files that diffusers and transformers load, for other tools.

    diffusion_pytorch_model.safetensors     or model.safetensors, for a model of transformers
    config.json                             if the model has one: then `from_pretrained` reads the folder

Beyond 10 GB there are several files, NAME-00001-of-00003.safetensors, and an index, NAME.safetensors.index.json.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from smalti.checkpoint.format.manifest import WEIGHTS, FileRecord
from smalti.checkpoint.format.safetensors_layout import StoredTensor, encode_header, split
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.verification import write_with_digest
from smalti.system import Block, files

LARGEST_FILE = 10 * 10**9
"""Bytes of tensors in one file, as diffusers splits them."""

Read = Callable[[str], Iterable[Block]]
"""Returns the bytes of the tensor with this name, row by row, in blocks of any size."""
Config = Mapping[str, object]


def write_copy(checkpoint: Path, model_files: Sequence[str], config: Config | None) -> dict[str, FileRecord]:
    """Write the copy into an unfinished checkpoint; returns its files by relative name.

    Reads what all ranks have written, `model_files` relative to `checkpoint`, tensor by tensor: it needs the memory of one
    tensor, and no communication. Everything is synced except the directory of the checkpoint itself.
    """
    stored = TensorFiles(checkpoint / name for name in model_files)
    folder = checkpoint / WEIGHTS
    files.make_directory(folder)
    records = write_weights(folder, stored.tensors, lambda name: [stored.read(name)], config)
    return {f"{WEIGHTS}/{name}": record for name, record in records.items()}


def write_weights(
    folder: Path, tensors: Mapping[str, StoredTensor], read: Read, config: Config | None, *, largest_file: int = LARGEST_FILE
) -> dict[str, FileRecord]:
    """Write complete tensors into an empty folder; returns the files by name. Everything is synced.

    `config` becomes config.json; None if the model has none.
    """
    stem = _stem(config)
    chunks = {name: tensor.whole for name, tensor in tensors.items()}
    parts = split(chunks, largest_file) or [[]]
    records: dict[str, FileRecord] = {}
    places: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        file = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        header = encode_header([(name, chunks[name]) for name in names], plain=True)
        records[file] = write_with_digest(folder / file, chain([header], (block for name in names for block in read(name))))
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        size = sum(chunk.size for chunk in chunks.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        name = f"{stem}.safetensors.index.json"
        records[name] = write_with_digest(folder / name, [_json(index)])
    if config is not None:
        records["config.json"] = write_with_digest(folder / "config.json", [_json(config)])
    files.fsync_directory(folder)
    return records


def _stem(config: Config | None) -> str:
    """The file name that tools expect. Configs of transformers have a `model_type`, those of diffusers do not."""
    is_transformers = config is not None and "model_type" in config and "_class_name" not in config
    return "model" if is_transformers else "diffusion_pytorch_model"


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
