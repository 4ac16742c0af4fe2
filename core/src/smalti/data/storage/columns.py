"""Listings as columns: batches of Arrow instead of an object for each file. Imports no torch; pyarrow when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

ROWS = 1 << 16
"""Rows of a batch, at most."""


def file_columns(keys: list[str], sizes: list[int], etags: list[str]) -> pa.RecordBatch:
    """Returns one batch of a listing."""
    import pyarrow as pa

    arrays = [pa.array(keys, pa.string()), pa.array(sizes, pa.int64()), pa.array(etags, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, names=["key", "size", "etag"])


def text_parts(array: pa.Array) -> tuple[memoryview, NDArray[np.int32]]:
    """Returns the bytes of an array of strings without nulls, one after the other, and their lengths. Views where possible."""
    import numpy as np

    _, offsets, data = array.buffers()
    if len(array) == 0:
        return memoryview(b""), np.zeros(0, dtype=np.int32)
    ends: NDArray[np.int32] = np.frombuffer(offsets, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    text = memoryview(data)[int(ends[0]) : int(ends[-1])] if data is not None else memoryview(b"")
    return text, np.diff(ends)
