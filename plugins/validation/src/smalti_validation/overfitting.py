"""What the evaluations of a run say together: which noise levels overfit, and which held-out images do not improve.

Imports no torch. Shapes: N held-out images, T noise levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from smalti import UserError
from smalti.checkpoint import RANKING
from smalti.rundir import RunDirectory
from smalti.system import load_json, read_regular
from smalti_validation.history import FOLDER, NAMES, Change, mean_change, read_table


@dataclass(frozen=True, kw_only=True)
class Level:
    """One noise level. `best` is the step with the lowest loss, `change` that of the last step since then; None if it is it."""

    timestep: int
    best: int
    best_loss: float
    last_loss: float
    change: Change | None

    @property
    def overfits(self) -> bool:
        """Whether the loss has clearly risen since its best step."""
        return self.change is not None and self.change.worsens


@dataclass(frozen=True, kw_only=True)
class Image:
    """One held-out image: its mean loss over the noise levels at the first and at the last step."""

    name: str
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Evaluations of a run, over the `images` that all of them have measured; those that improved least come first.

    `factors` are as in `smalti.types.EvaluationResult`.
    """

    first: int
    last: int
    levels: tuple[Level, ...]
    images: tuple[Image, ...]
    factors: tuple[str, ...] = ()

    @property
    def worse(self) -> int:
        """How many images have a higher loss than at the first step."""
        return sum(image.last > image.first for image in self.images)


def read_report(directory: RunDirectory) -> Report | None:
    """The report of a run; None if it was not evaluated. Raises UserError or CheckpointError if its files are damaged."""
    tables = {int(path.stem): read_table(path) for path in sorted((directory.path / FOLDER).glob("[0-9]*.npy"))}
    event = directory.latest("eval")
    if not tables or event is None:
        return None
    newest = tables[max(tables)]
    tables = {step: table for step, table in tables.items() if table["losses"].shape[1:] == newest["losses"].shape[1:]}
    try:
        ranking = load_json(read_regular(directory.checkpoints / RANKING))["evaluations"]
        tables = {step: table for step, table in tables.items() if str(step) in ranking}  # others measured something else
        content = load_json(read_regular(directory.path / FOLDER / NAMES))
        names = {int(number): str(name) for number, name in content.items()}
        timesteps = [int(name) for name in cast(Mapping[str, object], event.fields["by_timestep"])]
        factors = tuple(cast("list[str]", event.fields.get("factors", [])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the evaluations in {directory.path} are incomplete: {error}", fix="let the run evaluate again"
        ) from error
    return replace(report_of(tables, timesteps, names), factors=factors)


def report_of(tables: Mapping[int, NDArray[np.void]], timesteps: list[int], names: Mapping[int, str]) -> Report:
    """The report of tables by step, over the images that the last one shares with all others."""
    steps = sorted(tables)
    common = tables[steps[-1]]["image"]
    for table in tables.values():
        common = np.intersect1d(common, table["image"])
    rows = {step: np.isin(table["image"], common) for step, table in tables.items()}
    order = {step: np.argsort(tables[step]["image"][rows[step]]) for step in steps}
    losses = np.stack([tables[step]["losses"][rows[step]][order[step]].astype(float) for step in steps])  # (steps, N, T)
    levels = []
    for place, timestep in enumerate(timesteps):
        means = losses[:, :, place].mean(axis=1)
        best = int(np.argmin(means))
        change = mean_change(losses[-1, :, place] - losses[best, :, place], steps[best]) if steps[best] != steps[-1] else None
        level = Level(
            timestep=timestep, best=steps[best], best_loss=float(means[best]), last_loss=float(means[-1]), change=change
        )
        levels.append(level)
    first, last = losses[0].mean(axis=1), losses[-1].mean(axis=1)
    images = [
        Image(name=names.get(int(number), str(number)), first=float(before), last=float(after))
        for number, before, after in zip(np.sort(common), first, last, strict=True)
    ]
    images.sort(key=lambda image: image.first - image.last)
    return Report(first=steps[0], last=steps[-1], levels=tuple(levels), images=tuple(images))
