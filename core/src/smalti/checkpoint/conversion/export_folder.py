"""What a family writes an export with: the trained tensors of one checkpoint, one at a time, and the files around them.

Every file is synced, and recorded with its digest so that it can be read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.dtypes import DTYPES, NAMES
from smalti.checkpoint.format.digests import matches, write_with_digest
from smalti.checkpoint.format.full_weights import LARGEST_FILE, write_weights
from smalti.checkpoint.format.manifest import FileRecord
from smalti.checkpoint.format.safetensors_layout import Chunk, StoredTensor, encode_header
from smalti.checkpoint.planning import memory
from smalti.errors import UserError
from smalti.system import Block, files

Precision = Literal["fp32", "bf16", "fp16"]
Progress = Callable[[int, int], None]
"""Told of bytes of trained tensors that are done, and of how many there are."""

_BLOCK = 4 * 2**20
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trained:
    """The tensors that a run has trained, out of a checkpoint of any backend. Only headers are read at first.

    With `averaged`, the averaged ones (EMA) where there is an average. Floating-point tensors become `precision`; None leaves
    them as they are. Raises UserError when there is no average.
    """

    def __init__(self, checkpoint: OwnCheckpoint, *, averaged: bool, precision: Precision | None) -> None:
        self._checkpoint = checkpoint
        self._dtype = _PRECISIONS[precision] if precision else None
        found = checkpoint.contents.tensors
        self._places = {name.removeprefix("model/"): name for name in found if name.startswith("model/")}
        if averaged:
            averages = {name.removeprefix("ema/"): name for name in found if name.startswith("ema/")}
            if not averages:
                raise UserError("the checkpoint holds no averaged weights (EMA)", fix="leave out --ema")
            self._places |= averages
        self.tensors: Mapping[str, StoredTensor] = {
            name: replace(found[place], dtype=NAMES[self._becomes(DTYPES[found[place].dtype])])
            for name, place in self._places.items()
        }

    @property
    def size(self) -> int:
        """Bytes of all tensors, in the types that they become."""
        return sum(tensor.size for tensor in self.tensors.values())

    def read(self, name: str) -> memoryview:
        """The bytes of one tensor, row by row. Raises UserError for a value that its new type cannot hold."""
        place = self._places[name]
        stored = self._checkpoint.contents.tensors[place]
        dtype = DTYPES[stored.dtype]
        (data,) = self._checkpoint.read(place)
        if self._becomes(dtype) == dtype or not stored.elements:
            return memoryview(data)
        tensor = torch.frombuffer(data, dtype=dtype)
        return memory(_converted(name, tensor, self._becomes(dtype)))

    def _becomes(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not torch.equal(converted.isfinite(), tensor.isfinite()):
        told = str(dtype).removeprefix("torch.")
        raise UserError(f"{name} has values that are too large for {told}", fix="--dtype=bf16, which has the range of fp32")
    return converted


class ExportFolder:
    """An empty folder that becomes an export. `adapter` is what the run said of its adapter; None when it had none."""

    def __init__(self, path: Path, trained: Trained, adapter: Mapping[str, object] | None, progress: Progress) -> None:
        self.adapter = adapter
        self.records: dict[str, FileRecord] = {}
        self._path = path
        self._trained = trained
        self._progress = progress
        self._done = 0

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Types and shapes of the trained tensors by their names in the model."""
        return self._trained.tensors

    def write_model(self, part: str, config: Mapping[str, object], *, largest_file: int = LARGEST_FILE) -> None:
        """All trained tensors and the model's configuration, in diffusers' layout, in the sub-folder `part` ("": in none)."""
        folder = self._folder(part)
        written = write_weights(folder, self.tensors, self._read, config, largest_file=largest_file)
        self.records |= {f"{part}/{name}" if part else name: record for name, record in written.items()}

    def write_tensors(self, name: str, renamed: Mapping[str, str], notes: Mapping[str, str]) -> None:
        """A safetensors file of trained tensors: their new names, and those that they have. `notes` become its metadata."""
        chunks = {
            new: Chunk(
                dtype=self.tensors[old].dtype, shape=self.tensors[old].shape, offsets=(0,) * len(self.tensors[old].shape)
            )
            for new, old in renamed.items()
        }
        header = encode_header(list(chunks.items()), plain=True, notes=notes)
        blocks = (block for old in renamed.values() for block in self._read(old))
        self.records[name] = write_with_digest(self._place(name), chain([header], blocks))

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        self.records[name] = write_with_digest(self._place(name), [data])

    def copy(self, source: Path, name: str) -> None:
        """A file as it is."""
        self.records[name] = write_with_digest(self._place(name), _blocks(source))

    def finish(self) -> dict[str, FileRecord]:
        """Sync the folders and read every file back. What was written, by name; raises OSError for what is damaged."""
        for folder in sorted({(self._path / name).parent for name in self.records}):
            files.fsync_directory(folder)
        damaged = [name for name, record in self.records.items() if not matches(self._path / name, record)]
        if damaged:
            raise OSError(f"what was written does not read back: {', '.join(damaged[:3])}")
        return self.records

    def _read(self, name: str) -> Iterator[Block]:
        data = self._trained.read(name)
        yield data
        self._done += len(data)
        self._progress(self._done, self._trained.size)

    def _place(self, name: str) -> Path:
        folder, _, file = name.rpartition("/")
        return self._folder(folder) / file

    def _folder(self, name: str) -> Path:
        folder = self._path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            yield data
