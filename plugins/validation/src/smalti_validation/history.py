"""The evaluations of a run: which steps are the best, and whether the loss still improves. Kept with the run.

    checkpoints/ranking.json      the loss of each evaluated step, and the steps, the best first
    evaluations/00000500.npy      the loss of each image at each noise level, of step 500
    evaluations/images.json       the names of the images, by their numbers in these tables

Two evaluations measure the same images with the same noise. So their difference is taken image by image, which leaves out how
much images differ from each other, and is known far more precisely than either loss. Only the main rank reads and writes.

Shapes: N held-out images, T noise levels.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smalti import CheckpointError
from smalti.checkpoint import RANKING
from smalti.rundir import RunDirectory
from smalti.system import atomic_write, load_json, read_regular

_log = logging.getLogger(__name__)
FOLDER = "evaluations"
"""The folder of the tables in a run directory."""
NAMES = "images.json"
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 % for 1 to 9 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How the loss differs from that of step `since`, over the same images with the same noise.

    `interval` is half the width of the 95 % confidence interval; None of a single image.
    """

    since: int
    loss: float
    interval: float | None

    @property
    def improves(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.loss + (self.interval or 0.0) < 0

    @property
    def worsens(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.loss - (self.interval or 0.0) > 0


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation. `loss` is None if it was not finite. Later ones are compared with the last that has `improved`."""

    loss: float | None
    improved: bool


def table_of(images: Sequence[int], losses: NDArray[np.float64]) -> NDArray[np.void]:
    """The losses (N, T) of images by their numbers, as they are kept."""
    table = np.zeros(len(images), dtype=[("image", "<u8"), ("losses", "<f4", losses.shape[1:])])
    table["image"], table["losses"] = images, losses
    return table


def change_of(table: NDArray[np.void], before: NDArray[np.void], since: int) -> Change | None:
    """The change of the mean over the images that both tables have; None if there are none."""
    _, here, there = np.intersect1d(table["image"], before["image"], return_indices=True)
    return mean_change((table["losses"][here].astype(float) - before["losses"][there]).mean(axis=1), since)


def mean_change(differences: NDArray[np.float64], since: int) -> Change | None:
    """The mean of differences (N,), with its confidence interval; None without any."""
    count = len(differences)
    if count == 0:
        return None
    interval = None if count == 1 else _quantile(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return Change(since=since, loss=float(differences.mean()), interval=interval)


def _quantile(degrees: int) -> float:
    """Student's t at 97.5 %: half the width of a 95 % confidence interval, in standard errors."""
    return _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else 1.96 + 2.4 / degrees


class History:
    """The evaluations of a run that measured the same thing, described by `measured`: images, noise and loss.

    `begin` is the step at which the launch began: what a resume from an earlier step has left behind is ranked too, but the
    present weights are compared with those only that they come from.
    """

    def __init__(self, directory: RunDirectory, measured: str, begin: int) -> None:
        """Raises CheckpointError if the file is damaged."""
        self._folder = directory.path / FOLDER
        self._file = directory.checkpoints / RANKING
        self._measured = measured
        self._evaluated = self._read()
        self._past = {step: each for step, each in self._evaluated.items() if step <= begin}

    def _read(self) -> dict[int, Evaluated]:
        try:
            content = load_json(read_regular(self._file))
            found = {int(step): Evaluated(**each) for step, each in content["evaluations"].items()}
            if content["measured"] != self._measured:
                _log.warning("%s: other images, noise or loss were evaluated before, so the ranking starts over", self._file)
                return {}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{self._file} is damaged: {error}"
            raise CheckpointError(message, fix="remove it; the next evaluation writes a new one") from error
        return found

    def __contains__(self, step: int) -> bool:
        return step in self._past

    def loss(self, step: int) -> float:
        """The loss of a step; infinite if it was not finite, or not evaluated."""
        found = self._evaluated.get(step)
        return math.inf if found is None or found.loss is None else found.loss

    @property
    def reference(self) -> int | None:
        """The last step that clearly improved the loss."""
        return max((step for step, each in self._past.items() if each.improved), default=None)

    @property
    def since_reference(self) -> int:
        """How many evaluations came after it without another improvement."""
        reference = self.reference
        return len(self._past) if reference is None else sum(step > reference for step in self._past)

    def compare(self, table: NDArray[np.void]) -> Change | None:
        """How a table differs from that of the reference; None without one."""
        if (reference := self.reference) is None:
            return None
        path = table_file(self._folder, reference)
        try:
            return change_of(table, read_table(path), reference)
        except FileNotFoundError:
            _log.warning("%s is missing, so later evaluations are compared with this one", path)
            return None

    def name_images(self, names: Mapping[int, str]) -> None:
        """Write the names of images, by their numbers."""
        self._folder.mkdir(exist_ok=True)
        atomic_write(self._folder / NAMES, json.dumps(names, indent=0, ensure_ascii=False).encode() + b"\n")

    def add(self, step: int, loss: float, table: NDArray[np.void], change: Change | None, *, keep: int) -> None:
        """Write an evaluation, with its `change` to the reference. `keep` of the best checkpoints are not removed."""
        finite = math.isfinite(loss)
        made = Evaluated(loss=loss if finite else None, improved=finite and (change is None or change.improves))
        self._folder.mkdir(exist_ok=True)
        written = BytesIO()
        np.save(written, table)
        atomic_write(table_file(self._folder, step), written.getvalue())
        self._evaluated[step] = self._past[step] = made
        ranked = sorted((each for each in self._evaluated if self._evaluated[each].loss is not None), key=self.loss)
        evaluations = {str(each): asdict(self._evaluated[each]) for each in sorted(self._evaluated)}
        content = {"keep": keep, "steps": ranked, "measured": self._measured, "evaluations": evaluations}
        self._file.parent.mkdir(exist_ok=True)
        atomic_write(self._file, json.dumps(content, indent=1).encode() + b"\n")


def table_file(folder: Path, step: int) -> Path:
    """The file of a step's table."""
    return folder / f"{step:08d}.npy"


def read_table(path: Path) -> NDArray[np.void]:
    """A table, as `table_of` made it. Raises OSError, and CheckpointError if it is damaged."""
    try:
        table: NDArray[np.void] = np.load(BytesIO(read_regular(path)), allow_pickle=False)
        if table.dtype.names != ("image", "losses"):
            raise ValueError("it has other columns")
    except (ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", fix="remove it; the next evaluation takes its place") from error
    return table
