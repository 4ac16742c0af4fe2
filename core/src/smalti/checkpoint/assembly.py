"""Whole tensors out of the pieces in which safetensors files hold them, one at a time.

Importing this module imports no torch. Tensors are bytes here, whatever their type: (*shape, bytes of an element).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint.tensorfile import ITEM_SIZES, Piece, StoredTensor, join, read_layout
from smalti.errors import CheckpointError


class TensorFiles:
    """The tensors in some safetensors files, of which each may hold any pieces. Only headers are read at first.

    Raises CheckpointError for a file that is not sound, and when pieces of one tensor disagree or leave a gap.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: dict[str, list[tuple[Path, Piece, int]]] = {}
        for path in paths:
            try:
                layout = read_layout(path)
            except CheckpointError as error:
                raise CheckpointError(f"{path} {error.message}") from error
            for name, (piece, position) in layout.items():
                self._places.setdefault(name, []).append((path, piece, position))
        self.tensors: Mapping[str, StoredTensor] = {
            name: join(name, [piece for _, piece, _ in places]) for name, places in sorted(self._places.items())
        }

    def read(self, name: str) -> memoryview:
        """The bytes of a whole tensor, row by row. Holds this one tensor in memory and no other."""
        tensor = self.tensors[name]
        whole = np.zeros((*tensor.shape, ITEM_SIZES[tensor.dtype]), dtype=np.uint8)
        for path, piece, position in self._places[name]:
            box = tuple(slice(start, start + length) for start, length in zip(piece.offsets, piece.shape, strict=True))
            with path.open("rb") as file:
                file.seek(position)
                if not _fill(whole[box], file):
                    raise CheckpointError(f"{path} ends within {name}")
        return whole.reshape(-1).data


def _fill(box: NDArray[np.uint8], file: BufferedReader) -> bool:
    """Read the next bytes of a file into a box, row by row, without a copy in between; False at the end of the file."""
    if box.flags.c_contiguous:
        return file.readinto(box.reshape(-1).data) == box.size
    return all(_fill(part, file) for part in box)
