"""Whole tensors out of the chunks in which safetensors files hold them, one at a time.

Importing this module imports no torch. Tensors are bytes here, whatever their type: (*shape, bytes of an element).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint.format.safetensors_layout import ITEM_SIZES, Chunk, StoredTensor, join, read_layout
from smalti.errors import CheckpointError


class TensorFiles:
    """The tensors in some safetensors files, of which each may hold any chunks. Only headers are read at first.

    Raises CheckpointError for a file that is not sound, and when chunks of one tensor disagree or leave a gap.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: dict[str, list[tuple[Path, Chunk, int]]] = {}
        for path in paths:
            try:
                layout = read_layout(path)
            except CheckpointError as error:
                raise CheckpointError(f"{path} {error.message}") from error
            for name, (chunk, position) in layout.items():
                self._places.setdefault(name, []).append((path, chunk, position))
        self.tensors: Mapping[str, StoredTensor] = {
            name: join(name, [chunk for _, chunk, _ in places]) for name, places in sorted(self._places.items())
        }

    def read(self, name: str) -> memoryview:
        """The bytes of a whole tensor, row by row. Holds this one tensor in memory and no other."""
        tensor = self.tensors[name]
        whole = np.zeros((*tensor.shape, ITEM_SIZES[tensor.dtype]), dtype=np.uint8)
        for path, chunk, position in self._places[name]:
            box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.shape, strict=True))
            with path.open("rb") as file:
                file.seek(position)
                if not _fill(whole[box], file):
                    raise CheckpointError(f"{path} ends within {name}")
        return whole.reshape(-1).data

    def read_into(self, room: memoryview, name: str, begin: int) -> None:
        """The bytes of as many elements as there is room for, counted row by row, from element `begin` on.

        Straight from the files where chunks are whole rows. Where they are cut otherwise, by way of the whole tensor.
        """
        tensor = self.tensors[name]
        item = ITEM_SIZES[tensor.dtype]
        end = begin + len(room) // item
        if any(not _of_whole_rows(chunk, tensor) for _, chunk, _ in self._places[name]):
            room[:] = self.read(name)[begin * item : end * item]
            return
        row = math.prod(tensor.shape[1:])
        for path, chunk, position in self._places[name]:
            first = chunk.offsets[0] * row if chunk.offsets else 0
            start, stop = max(begin, first), min(end, first + math.prod(chunk.shape))
            if start < stop:
                with path.open("rb") as file:
                    file.seek(position + (start - first) * item)
                    part = room[(start - begin) * item : (stop - begin) * item]
                    if file.readinto(part) != len(part):
                        raise CheckpointError(f"{path} ends within {name}")


def _of_whole_rows(chunk: Chunk, tensor: StoredTensor) -> bool:
    return chunk.shape[1:] == tensor.shape[1:]


def _fill(box: NDArray[np.uint8], file: BufferedReader) -> bool:
    """Read the next bytes of a file into a box, row by row, without a copy in between; False at the end of the file."""
    if box.flags.c_contiguous:
        return file.readinto(box.reshape(-1).data) == box.size
    return all(_fill(part, file) for part in box)
