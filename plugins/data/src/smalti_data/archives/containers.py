"""Datasets whose images are parts of larger files: archives, and tables that hold the images themselves.

Each such file, a container, is read once; what was found is kept by its etag. The samples of a container are neighbours in the
index, so that encoding in the order of the index reads it from start to end.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from smalti import UserError
from smalti.data import (
    FILES,
    LISTED,
    DatasetSpec,
    Listed,
    ListedState,
    ListingDigest,
    MetadataSource,
    Storage,
    StoredFile,
    Threads,
)
from smalti.system import atomic_write, load_json

_ROWS = 1 << 16  # at once

_log = logging.getLogger(__name__)
_THREADS = 4
_FORMAT = 1  # increase it when something else is found in the same containers


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a container: its samples (`LISTED`), sorted by key, and messages about the others."""

    rows: pa.RecordBatch
    notices: tuple[str, ...] = ()


class ContainerSource(MetadataSource, ABC):
    """A metadata source of containers. A subclass finds the samples of one container, and reads them by their place.

    The keys of a container's samples begin with its own key and a slash.
    """

    kind = ""
    """What messages call a container, such as "tar shards"."""

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self._folder: Path | None = None

    @abstractmethod
    def containers(self) -> Sequence[StoredFile]:
        """All containers of the storage."""

    @abstractmethod
    def open(self, file: StoredFile) -> Contents:
        """Read a container. Raises a StorageError. A damaged one has what can be used of it, and a sample with a `problem`."""

    @property
    @abstractmethod
    def recipe(self) -> object:
        """The settings of `open`, as values that JSON can hold. Contents found under other settings are read again."""

    def use_folder(self, folder: Path) -> None:
        self._folder = folder / "containers"

    def is_unchanged(self, before: ListedState) -> bool:
        if self._digest(self._sorted()) != before.digest:
            return False
        self.notices = before.notices
        return True

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        self.listed_state = None
        files = self._sorted()
        if not files:
            raise UserError(
                f"dataset {self._spec.id!r}: no {self.kind} in {self._storage.location}", fix="check instance_data_dir"
            )
        notices: list[str] = []
        for contents in self._contents(files):
            notices += contents.notices
            for start in range(0, contents.rows.num_rows, _ROWS):
                yield contents.rows.slice(start, _ROWS)
        self.notices = tuple(f"dataset {self._spec.id}: {notice}" for notice in notices)
        self._forget_others(files)
        self.listed_state = ListedState(digest=self._digest(files), notices=self.notices)

    def _sorted(self) -> Sequence[StoredFile]:
        return sorted(self.containers(), key=lambda file: f"{file.key}/")

    def _digest(self, files: Sequence[StoredFile]) -> str:
        """The digest of all that determines the samples."""
        digest = ListingDigest()
        columns = ([file.key for file in files], [file.size for file in files], [file.etag for file in files])
        arrays = [pa.array(column, field.type) for column, field in zip(columns, FILES, strict=True)]
        digest.add(pa.RecordBatch.from_arrays(arrays, schema=FILES))
        return digest.result(self._spec.id, json.dumps([_FORMAT, self.recipe], sort_keys=True))

    def _contents(self, files: Sequence[StoredFile]) -> Iterator[Contents]:
        """The contents of all containers in order; a few are read at the same time."""
        left, running = deque(files), deque[Future[Contents]]()
        with Threads(_THREADS, "smalti-containers") as pool:
            while left or running:
                while left and len(running) < 2 * _THREADS:
                    running.append(pool.submit(self._kept_or_opened, left.popleft()))
                yield running.popleft().result()

    def _kept_or_opened(self, file: StoredFile) -> Contents:
        """The contents of a container: those of an earlier scan if it has not changed since."""
        recipe = json.dumps([_FORMAT, file.key, file.etag, file.size, self.recipe], sort_keys=True).encode()
        path = self._path(file)
        if path is not None and (known := _read(path, recipe)) is not None:
            return known
        contents = self.open(file)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, _written(contents, recipe))
        return contents

    def _path(self, file: StoredFile) -> Path | None:
        return self._folder / f"{sha256(file.key.encode()).hexdigest()[:32]}.arrow" if self._folder else None

    def _forget_others(self, files: Sequence[StoredFile]) -> None:
        """Remove what was kept of containers that are no longer there."""
        if self._folder is not None and self._folder.is_dir():
            used = {self._path(file) for file in files}
            for path in self._folder.glob("*.arrow"):
                if path not in used:
                    path.unlink(missing_ok=True)


def rows_of(listed: Sequence[Listed]) -> pa.RecordBatch:
    """Samples as columns, sorted by key."""
    ordered = sorted(listed, key=lambda one: one.key)
    columns = [[getattr(one, field.name) for one in ordered] for field in LISTED]
    return pa.RecordBatch.from_arrays([pa.array(c, f.type) for c, f in zip(columns, LISTED, strict=True)], schema=LISTED)


def _written(contents: Contents, recipe: bytes) -> bytes:
    metadata = {"recipe": recipe, "notices": json.dumps(contents.notices)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LISTED.with_metadata(metadata), options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(contents.rows.replace_schema_metadata(metadata))
    return bytes(sink.getvalue())


def _read(path: Path, recipe: bytes) -> Contents | None:
    try:
        with pa.ipc.open_file(path.read_bytes()) as reader:
            metadata = reader.schema.metadata or {}
            if metadata.get(b"recipe") != recipe:
                return None
            rows = reader.get_batch(0).replace_schema_metadata(None)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        _log.warning("%s cannot be read (%s); the container is read again", path, error)
        return None
    return Contents(rows=rows, notices=tuple(load_json(metadata[b"notices"])))
