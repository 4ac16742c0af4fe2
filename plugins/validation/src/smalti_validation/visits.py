"""The loss of each training image at each of its visits, as it is kept in the run directory.

    visits/8x4x2/3.bin     what data rank 3 of 8 has trained on, in 2 micro-batches of 4 images per step

A record of 8 bytes has loss, noise level and image: 0.8 GB for 100 million visits, over all files. Its place follows from the
position of the batch. So a resume from an earlier step cuts the files there and goes on, with any number of ranks; no visit is
there twice, and those of steps that were skipped are zeros. Each file has one writer. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smalti import Visits
from smalti.system import open_regular, text_hash

FOLDER = "visits"
"""The folder of a run directory."""
RECORD = np.dtype([("loss", "<f2"), ("noise", "<u2"), ("image", "<u4")])
"""`noise` is 1 to `NOISE_LEVELS` where there is a record, `image` the number of its name: `image_number`."""
NOISE_LEVELS = 65_535
_LARGEST = float(np.finfo(np.float16).max)
_AT_ONCE = 1 << 20
_NAME = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True, kw_only=True)
class Share:
    """How a batch is divided: `accumulation` times among `ranks` data ranks, which get `micro_batch` samples each."""

    ranks: int
    micro_batch: int
    accumulation: int

    @property
    def name(self) -> str:
        """That of the folder."""
        return f"{self.ranks}x{self.micro_batch}x{self.accumulation}"

    @property
    def count(self) -> int:
        """Samples of one rank in a step."""
        return self.micro_batch * self.accumulation

    def numbers(self, rank: int, start: int, count: int) -> NDArray[np.int64]:
        """The numbers of visits, as `smalti.types.Visits` has them, of records `start` and so on in the file of a rank."""
        places = np.arange(start, start + count)
        forward_pass, place = divmod(places, self.micro_batch)  # counted over all steps
        return (forward_pass * self.ranks + rank) * self.micro_batch + place


def image_number(name: str) -> int:
    """The number of an image by its name DATASET/KEY: 32 bits of a hash."""
    return text_hash(name) & 0xFFFFFFFF


class VisitFile:
    """The file of one rank. It is created when something is written."""

    def __init__(self, folder: Path, share: Share, rank: int) -> None:
        self._path = folder / share.name / f"{rank}.bin"
        self._count = share.count
        self._file = -1

    def write(self, visits: Visits, batch: int) -> None:
        """Write the visits of a step; `batch` is the effective batch. Raises OSError."""
        if self._file < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        records = np.zeros(len(visits.numbers), dtype=RECORD)
        records["loss"] = np.minimum(visits.losses, _LARGEST)
        records["noise"] = np.maximum(1, np.rint(np.multiply(visits.fractions, NOISE_LEVELS)))
        records["image"] = [image_number(key) for key in visits.keys]
        place = visits.numbers[0] // batch * self._count
        os.pwrite(self._file, records.tobytes(), place * RECORD.itemsize)

    def close(self) -> None:
        """May be called again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def truncate(folder: Path, position: int) -> None:
    """Remove the visits of batches from `position` on, which are trained on again. Raises OSError."""
    for share, _, path in _files(folder):
        size = position * share.count * RECORD.itemsize
        if path.stat().st_size > size:
            os.truncate(path, size)


def read_visits(folder: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]]:
    """Yields numbers of visits, positions of their batches, and their records, of parts of the files. Raises OSError."""
    for share, rank, path in _files(folder):
        with open_regular(path) as file:
            start = 0
            while part := file.read(_AT_ONCE * RECORD.itemsize):
                records = np.frombuffer(part, dtype=RECORD, count=len(part) // RECORD.itemsize)
                there = np.flatnonzero((records["noise"] > 0) & np.isfinite(records["loss"]))
                numbers = share.numbers(rank, start, len(records))[there]
                yield numbers, (start + there) // share.count, records[there]
                start += len(records)


def _files(folder: Path) -> Iterator[tuple[Share, int, Path]]:
    """How batches were divided, the rank, and the path of each file."""
    for path in sorted(folder.glob("*/*.bin")):
        if (match := _NAME.fullmatch(path.parent.name)) and path.stem.isdecimal():
            ranks, micro_batch, accumulation = map(int, match.groups())
            yield Share(ranks=ranks, micro_batch=micro_batch, accumulation=accumulation), int(path.stem), path
