"""A file of a storage that can be read at any position, in blocks: few requests, bounded memory."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from typing import Any

from smalti.data import Storage

BLOCK = 2 << 20
_BLOCKS = 8


class RangeFile(io.RawIOBase):
    """A binary file over `Storage.read_range`. Keeps the last blocks, since readers of columns jump between a few places.

    A read of more than a block is one request. Errors of the storage are raised as they are.
    """

    def __init__(self, storage: Storage, key: str, size: int) -> None:
        self._storage = storage
        self._key = key
        self._size = size
        self._at = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        wanted = self._size - self._at if size is None or size < 0 else min(size, self._size - self._at)
        if wanted <= 0:
            return b""
        start, self._at = self._at, self._at + wanted
        if wanted >= BLOCK:
            return self._storage.read_range(self._key, start, wanted)
        first, last = start // BLOCK, (start + wanted - 1) // BLOCK
        data = b"".join(self._block(number) for number in range(first, last + 1))
        return data[start - first * BLOCK :][:wanted]

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _block(self, number: int) -> bytes:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
        data = self._storage.read_range(self._key, number * BLOCK, BLOCK)
        with self._lock:
            self._blocks[number] = data
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        return data
