"""The folder that a family writes an export to, and the trained tensors that it reads, one at a time.

Every file is synced, and its digest is recorded to verify it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from smalti import UserError
from smalti.checkpoint import (
    DTYPES,
    ITEM_SIZES,
    NAMES,
    Computed,
    ExportRequest,
    FileRecord,
    OwnCheckpoint,
    StoredTensor,
    Usage,
    check_free_space,
    encode_header,
    matches,
    memory,
    write_weights,
    write_with_digest,
)
from smalti.system import Block, files

Precision = Literal["fp32", "bf16", "fp16"]
Progress = Callable[[int, int], None]
"""Called with the bytes of trained tensors done and the total."""

_BLOCK = 4 * 2**20
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainedWeights:
    """The tensors that a run has trained, from a checkpoint of any backend. Only headers are read at first.

    With `use_ema`, the EMA weights where there are any. Floating-point tensors are converted to `precision`; None keeps their
    types. Raises UserError if the checkpoint has no EMA weights.
    """

    def __init__(self, checkpoint: OwnCheckpoint, *, use_ema: bool, precision: Precision | None) -> None:
        self._checkpoint = checkpoint
        self._dtype = _PRECISIONS[precision] if precision else None
        found = checkpoint.contents.tensors
        self._places = {name.removeprefix("model/"): name for name in found if name.startswith("model/")}
        if use_ema:
            ema_weights = {name.removeprefix("ema/"): name for name in found if name.startswith("ema/")}
            if not ema_weights:
                raise UserError("the checkpoint has no EMA weights", fix="leave out --ema")
            self._places |= ema_weights
        self.tensors: Mapping[str, StoredTensor] = {
            name: replace(found[place], dtype=NAMES[self._target_dtype(DTYPES[found[place].dtype])])
            for name, place in self._places.items()
        }

    @property
    def size(self) -> int:
        """Bytes of all tensors, in their target types."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype | None:
        """The type to which tensors are converted; None keeps theirs."""
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        """One complete tensor, in the type in which it is stored."""
        stored = self._checkpoint.contents.tensors[self._places[name]]
        dtype = DTYPES[stored.dtype]
        if not stored.elements:
            return torch.empty(stored.shape, dtype=dtype)
        (data,) = self._checkpoint.read(self._places[name])
        return torch.frombuffer(data, dtype=dtype).view(stored.shape)

    def read(self, name: str) -> memoryview:
        """The bytes of one tensor, row by row. Raises UserError for a value that the target type cannot represent."""
        tensor = self.tensor(name)
        return memory(_converted(name, tensor, self._target_dtype(tensor.dtype)))

    def _target_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if dtype != tensor.dtype and not torch.equal(converted.isfinite(), tensor.isfinite()):
        name_of_dtype = str(dtype).removeprefix("torch.")
        raise UserError(
            f"{name} has values that are too large for {name_of_dtype}", fix="--dtype=bf16, which has the range of fp32"
        )
    return converted


class NewExport:
    """The `ExportFolder` that a family is given: an empty folder at `path`. `name` is what it will be called.

    `adapter` describes the adapter of the run; None without one. `records` has the files that were written.
    """

    def __init__(
        self,
        path: Path,
        trained: TrainedWeights,
        adapter: Mapping[str, object] | None,
        progress: Progress,
        *,
        name: str = "export",
        request: ExportRequest | None = None,
    ) -> None:
        self.adapter = adapter
        self.name = name
        self.request = request or ExportRequest()
        self.usages: list[Usage] = []
        self.metadata: dict[str, object] = {}
        self.records: dict[str, FileRecord] = {}
        self._path = path
        self._trained = trained
        self._progress = progress
        self._done = 0

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Types and shapes of the trained tensors, by their names in the model."""
        return self._trained.tensors

    def write_model(self, part: str, config: Mapping[str, object], *, tensors: Mapping[str, Computed] | None = None) -> None:
        """Write a model and its config, in diffusers' layout, to the sub-folder `part` ("": none).

        `tensors` are all tensors of the model, computed one at a time; None takes the trained tensors as they are.
        """
        folder, largest = self._folder(part), self.request.largest_file
        if tensors is None:
            written = write_weights(folder, self.tensors, self._read, config, largest_file=largest)
        else:
            stored = self._stored(tensors)
            check_free_space(folder, stored.values())
            written = write_weights(folder, stored, self._computing(tensors), config, largest_file=largest)
        self.records |= {f"{part}/{name}" if part else name: record for name, record in written.items()}

    def tensor(self, name: str) -> Tensor:
        """One trained tensor, in the type in which it is stored."""
        return self._trained.tensor(name)

    def write_computed(self, name: str, tensors: Mapping[str, Computed], notes: Mapping[str, str]) -> None:
        """Write a safetensors file of tensors that are computed one at a time; `notes` are its metadata."""
        stored = self._stored(tensors)
        check_free_space(self._place(name).parent, stored.values())
        # Wide elements first, so that every tensor starts at a multiple of its element size.
        order = sorted(tensors, key=lambda key: -ITEM_SIZES[stored[key].dtype])
        header = encode_header([(key, stored[key].whole) for key in order], plain=True, notes=notes)
        read = self._computing(tensors)
        self.records[name] = write_with_digest(
            self._place(name), chain([header], (block for key in order for block in read(key)))
        )

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        self.records[name] = write_with_digest(self._place(name), [data])

    def write_text(self, name: str, text: str) -> None:
        self.records[name] = write_with_digest(self._place(name), [text.encode()])

    def copy(self, source: Path, name: str) -> None:
        """Copy a file unchanged."""
        self.records[name] = write_with_digest(self._place(name), _blocks(source))

    def finish(self) -> dict[str, FileRecord]:
        """Sync the folders and verify every file; returns the files by name. Raises OSError if one is damaged."""
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

    def _dtype_of(self, tensor: Computed) -> torch.dtype:
        """The type of a computed tensor in the file."""
        dtype = tensor.dtype or torch.float32
        return self._trained.dtype or dtype if dtype.is_floating_point and not tensor.fixed else dtype

    def _stored(self, tensors: Mapping[str, Computed]) -> dict[str, StoredTensor]:
        """Types and shapes in the file."""
        return {
            name: StoredTensor(dtype=NAMES[self._dtype_of(each)], shape=each.shape, chunks=1) for name, each in tensors.items()
        }

    def _computing(self, tensors: Mapping[str, Computed]) -> Callable[[str], Iterator[Block]]:
        """Returns a function that computes a tensor, converts it to its type in the file, and reports progress."""
        total, done = sum(math.prod(each.shape) for each in tensors.values()), 0

        def read(name: str) -> Iterator[Block]:
            nonlocal done
            each = tensors[name]
            yield memory(_converted(name, each.compute(), self._dtype_of(each)))
            done += math.prod(each.shape)
            self._progress(done, total)

        return read

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
