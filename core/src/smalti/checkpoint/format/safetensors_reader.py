"""Reads complete tensors from the chunks in safetensors files, one at a time.

Importing this module imports no torch. Tensors are bytes here, whatever their type: (*shape, bytes of an element).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint.format.safetensors_layout import ITEM_SIZES, StoredTensor, chunk_places, join, read_layout
from smalti.errors import CheckpointError


class TensorFiles:
    """The tensors in some safetensors files, each with any chunks. Only headers are read at first.

    Raises CheckpointError for an invalid file, and if chunks of one tensor disagree or leave a gap.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places = chunk_places(paths, read_layout)
        self.tensors: Mapping[str, StoredTensor] = {
            name: join(name, [chunk for _, chunk, _ in places]) for name, places in self._places.items()
        }

    def read(self, name: str) -> memoryview:
        """Returns the bytes of a complete tensor, row by row. Only this tensor is in memory."""
        tensor = self.tensors[name]
        data = np.zeros((*tensor.shape, ITEM_SIZES[tensor.dtype]), dtype=np.uint8)
        for path, chunk, position in self._places[name]:
            box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.shape, strict=True))
            with path.open("rb") as file:
                file.seek(position)
                if not _fill(data[box], file):
                    raise CheckpointError(f"{path} ends within {name}")
        return data.reshape(-1).data

    def read_into(self, target: memoryview, name: str, begin: int) -> None:
        """Fill `target` with the bytes of a tensor from byte `begin` on, row by row.

        Reads directly from the files if chunks are complete rows, and else the complete tensor first.
        """
        tensor = self.tensors[name]
        end = begin + len(target)
        if any(chunk.shape[1:] != tensor.shape[1:] for _, chunk, _ in self._places[name]):
            target[:] = self.read(name)[begin:end]
            return
        row = math.prod(tensor.shape[1:]) * ITEM_SIZES[tensor.dtype]
        for path, chunk, position in self._places[name]:
            first = chunk.offsets[0] * row if chunk.offsets else 0
            start, stop = max(begin, first), min(end, first + chunk.size)
            if start < stop:
                with path.open("rb") as file:
                    file.seek(position + start - first)
                    part = target[start - begin : stop - begin]
                    if file.readinto(part) != len(part):
                        raise CheckpointError(f"{path} ends within {name}")


def _fill(box: NDArray[np.uint8], file: BufferedReader) -> bool:
    """Read the next bytes of a file into an array, row by row, without a copy; returns False at the end of the file."""
    if box.flags.c_contiguous:
        return file.readinto(box.reshape(-1).data) == box.size
    return all(_fill(part, file) for part in box)
