"""Whether the files of a storage are those of an earlier scan: a digest of the listing, computed by columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from blake3 import blake3

from smalti.data.scan.index_file import text_parts
from smalti.data.sources.listing import files
from smalti.data.storage.protocol import Storage


class ListingDigest:
    """A digest of keys, sizes and etags. It does not depend on where a batch ends."""

    def __init__(self) -> None:
        self._states = [blake3() for _ in range(5)]

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next files of a listing (`FILES`)."""
        keys, key_lengths = text_parts(batch.column("key"))
        etags, etag_lengths = text_parts(batch.column("etag"))
        parts = (keys, key_lengths, etags, etag_lengths, batch.column("size").to_numpy())
        for state, part in zip(self._states, parts, strict=True):
            state.update(np.ascontiguousarray(part).view(np.uint8).data if isinstance(part, np.ndarray) else part)

    def passed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches, each of which is added."""
        for batch in batches:
            self.add(batch)
            yield batch

    def result(self, *others: str) -> str:
        """The digest in hexadecimal. `others` is what else determines the samples, such as the identity of a table."""
        texts = (blake3(text.encode()).digest() for text in others)
        return str(blake3(b"".join((*(state.digest() for state in self._states), *texts))).hexdigest())


def digest_of(storage: Storage, *others: str) -> str:
    """The digest of all files that are not hidden: lists the storage."""
    digest = ListingDigest()
    for batch in files(storage):
        digest.add(batch)
    return digest.result(*others)


def file_identity(path: Path) -> str:
    """Changes with the content of a file of this machine: its path, size and modification time. Raises OSError."""
    stat = path.stat()
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def stored_identity(storage: Storage, key: str) -> str:
    """The same for a file of a storage. Raises StorageError."""
    file = storage.stat(key)
    return f"{storage.location}/{key}:{file.size}:{file.etag}"
