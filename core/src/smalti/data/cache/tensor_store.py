"""Stores for encoded images and texts: small groups of tensors under keys, written once and never changed.

`FolderStore` is a folder of safetensors files, the parts. Each part is complete or absent: it is renamed into place when its
bytes are on the disk. A part is never changed and its name is unique, so processes may add parts at the same time; what two of
them put under one key is the same.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from smalti.checkpoint import DTYPES, ITEM_SIZES, NAMES, Chunk, encode_header
from smalti.errors import UserError
from smalti.system import create, fsync_directory, rename, sync, write

_log = logging.getLogger(__name__)

Entry = Mapping[str, Tensor]
"""Tensors by name. Names contain no "/"."""

Form = tuple[tuple[str, str, tuple[int, ...], int], ...]
"""The layout of an entry: name, type (as in safetensors), shape and first byte of each tensor. Most entries share one."""


class TensorStore(Protocol):
    """Entries by key. A key consists of letters and digits. All methods may be called from several threads."""

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Returns those of these keys that have no entry now; sees entries that other processes have added."""
        ...

    def put(self, entries: Mapping[str, Entry]) -> None:
        """Store these entries. Afterwards they survive a power failure. Raises UserError without space or permission."""
        ...

    def get(self, key: str) -> dict[str, Tensor]:
        """Returns one entry, on the CPU. Raises KeyError for a missing key, UserError if the entry cannot be read."""
        ...


class FolderStore:
    """A folder of parts; the location of every entry is kept in memory (about 220 bytes each).

    A part that cannot be read is reported once and counts as absent, so its entries are encoded again; it is not deleted.
    """

    def __init__(self, folder: Path, *, report: Callable[[str], object] = _log.warning) -> None:
        self.folder = folder
        self._report = report
        self._seen: set[str] = set()
        self._places: dict[bytes, tuple[Path, int, Form]] = {}
        self._forms: dict[Form, Form] = {}
        self._lock = threading.Lock()

    def missing(self, keys: Iterable[str]) -> set[str]:
        with self._lock:
            self._look()
        return {key for key in keys if key.encode() not in self._places}

    def put(self, entries: Mapping[str, Entry]) -> None:
        name = f"{secrets.token_hex(8)}.safetensors"
        tensors = {f"{key}/{part}": tensor for key, entry in entries.items() for part, tensor in _wide_first(entry)}
        draft = self.folder / f".{name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with create(draft) as file:
                write(file, encode_header([(each, _chunk(tensor)) for each, tensor in tensors.items()], plain=True))
                for tensor in tensors.values():
                    write(file, _bytes(tensor))
                sync(file)
            rename(draft, self.folder / name)
            fsync_directory(self.folder)
        except OSError as error:
            with suppress(OSError):  # it was not created, or the folder cannot be changed
                draft.unlink()
            reason = error.strerror or f"{error}"
            fix = (
                "free space or give write permission there, or set --cache_dir=FOLDER; written entries are kept, so start again"
            )
            raise UserError(f"cannot write {len(entries)} entries to {self.folder}: {reason}", fix=fix) from error

    def get(self, key: str) -> dict[str, Tensor]:
        path, start, form = self._places[key.encode()]
        _, dtype, shape, offset = form[-1]
        data = bytearray(offset + math.prod(shape) * ITEM_SIZES[dtype])
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                count = file.readinto(data)
        except OSError as error:
            raise _unreadable(path, error.strerror or f"{error}") from error
        if count != len(data):
            raise _unreadable(path, "it was truncated")
        return {name: _tensor(data, dtype, shape, begin) for name, dtype, shape, begin in form}

    def __str__(self) -> str:
        return str(self.folder)

    def _look(self) -> None:
        """Read the headers of new parts."""
        for name in sorted({path.name for path in self.folder.glob("*.safetensors")} - self._seen):
            path = self.folder / name
            self._seen.add(name)
            try:
                self._places |= self._entries(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{path} cannot be read ({type(error).__name__}: {error})"
                self._report(f"{problem}; its entries are encoded again, and it can be deleted")

    def _entries(self, path: Path) -> dict[bytes, tuple[Path, int, Form]]:
        """Returns the entries of a part. Raises ValueError, KeyError or TypeError if it is invalid."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        grouped: dict[str, tuple[int, list[tuple[str, str, tuple[int, ...], int]]]] = {}
        end = 0
        for full, tensor in header.items():
            if full == "__metadata__":
                continue
            key, _, name = full.partition("/")
            begin, end = tensor["data_offsets"]
            start, tensors = grouped.setdefault(key, (begin, []))
            tensors.append((name, tensor["dtype"], tuple(tensor["shape"]), begin - start))
        if 8 + length + end != size:
            raise ValueError("its size does not match its header")
        found = {}
        for key, (start, tensors) in grouped.items():
            form = tuple(tensors)
            # One object for all entries of the same layout.
            found[key.encode()] = path, 8 + length + start, self._forms.setdefault(form, form)
        return found


def _wide_first(entry: Entry) -> list[tuple[str, Tensor]]:
    """Then every tensor starts at a multiple of its element size."""
    return sorted(entry.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _chunk(tensor: Tensor) -> Chunk:
    return Chunk(dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), offsets=(0,) * tensor.ndim)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensor(data: bytearray, dtype: str, shape: tuple[int, ...], begin: int) -> Tensor:
    kind, count = DTYPES[dtype], math.prod(shape)
    flat = torch.frombuffer(data, dtype=kind, count=count, offset=begin) if count else torch.empty(0, dtype=kind)
    return flat.view(shape)


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(f"{path} can no longer be read: {reason}", fix="start again: missing entries are encoded again")
