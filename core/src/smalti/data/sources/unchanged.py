"""Whether the files of a storage are those of an earlier scan: a digest of the listing, computed by columns.

No Python object per file is made where the storage lists columns too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import IO, cast
from weakref import finalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from smalti.data.storage.columns import text_parts
from smalti.data.storage.protocol import Storage

FILES = pa.schema([("key", pa.string()), ("size", pa.int64()), ("etag", pa.string())])
WINDOW = 1 << 16
"""Rows at a time: large enough that the cost per batch disappears, small enough for bounded memory."""


def visible(files: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The files of a listing that are not hidden, with the schema `FILES`, in batches of about `WINDOW` rows."""
    for batch in rebatched(files, FILES):
        hidden = pc.or_(pc.starts_with(batch.column("key"), "."), pc.match_substring(batch.column("key"), "/."))
        yield batch.filter(pc.invert(hidden)) if pc.any(hidden).as_py() else batch


def rebatched(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int = WINDOW) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least `rows`, but for the last one, and at most twice as many. Drops other columns."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            waiting.append(
                pa.RecordBatch.from_arrays([part.column(field.name).cast(field.type) for field in schema], schema=schema)
            )
            count += part.num_rows
            if count >= rows:
                yield joined(waiting)
                waiting, count = [], 0
    if count:
        yield joined(waiting)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches of the same columns, at least one, as a single one."""
    return batches[0] if len(batches) == 1 else cast(pa.RecordBatch, pa.concat_batches(batches))


_MOST = 1 << 21
"""Files of a listing that is kept: about 200 MB on the disk."""


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


class ListedOnce:
    """The listing of a storage that is listed for its digest, and whose next listing is the same one.

    In between it is in an unnamed temporary file, up to `_MOST` files; a longer one is not kept, and listed again.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: IO[bytes] | None = None

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        kept, self._kept = self._kept, None
        if kept is None:
            yield from self._storage.list_columns()
            return
        with kept, pa.ipc.open_stream(kept) as reader:
            yield from reader

    def is_same(self, digest: str, *others: str) -> bool:
        """Whether all files that are not hidden have this digest. Lists the storage; if not, the listing is kept."""
        found = ListingDigest()
        for batch in visible(self.kept()):
            found.add(batch)
        same = found.result(*others) == digest
        if same and self._kept is not None:
            self._kept.close()
            self._kept = None
        return same

    def kept(self) -> Iterator[pa.RecordBatch]:
        """Lists the storage, and keeps the listing once it is complete."""
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(TemporaryFile(prefix="smalti-listing-"))
            writer: pa.ipc.RecordBatchStreamWriter | None = None
            count = 0
            for batch in self._storage.list_columns():
                count += len(batch)
                if count <= _MOST:
                    writer = writer or pa.ipc.new_stream(file, batch.schema)
                    writer.write_batch(batch)
                yield batch
            if writer is not None and count <= _MOST:
                writer.close()
                file.seek(0)
                stack.pop_all()
                finalize(self, file.close)  # if it is never read
                self._kept = file
