"""The table of runs: which ones, in which order, and a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smalti.rundir import Summary
from smalti_webui.runs.index import FoundRun, RunIndex
from smalti_webui.runs.sparkline import losses

PAGE = 50
SHOWN = ("all", "alive")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run in the table. `losses` is its small curve, oldest value first. `phase` is what it does, or how it ended.

    `place` is its path below the root in which it was found.
    """

    run: FoundRun
    summary: Summary
    losses: list[float]
    phase: str
    place: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A page of the table. `matching` counts the runs that the search admits, `total` all runs."""

    rows: list[Row]
    matching: int
    total: int
    number: int
    pages: int


class Rows:
    """Makes rows. The small curve of a run is read again only if its events have grown."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._losses: dict[str, tuple[int, list[float]]] = {}

    def table(self, search: str = "", shown: str = "all", number: int = 1) -> Table:
        """A page of the runs whose name or path contains a text."""
        runs = self._index.runs()
        text = search.casefold()
        admitted = [run for run in runs if text in f"{run.name} {run.path}".casefold()]
        if shown == "alive":
            admitted = [run for run in admitted if run.directory.heartbeat_file.exists()]
        pages = max(1, -(-len(admitted) // PAGE))
        number = min(max(number, 1), pages)
        rows = self._rows(admitted[(number - 1) * PAGE : number * PAGE])
        return Table(rows=rows, matching=len(admitted), total=len(runs), number=number, pages=pages)

    def _rows(self, runs: Sequence[FoundRun]) -> list[Row]:
        found = []
        for run in runs:
            summary = self._index.summary(run)
            if summary is not None:
                found.append(
                    Row(
                        run=run,
                        summary=summary,
                        losses=self._curve(run),
                        phase=phase_text(summary),
                        place=self._index.place(run),
                    )
                )
        return found

    def _curve(self, run: FoundRun) -> list[float]:
        file = run.directory.events_file
        try:
            size = file.stat().st_size
        except OSError:
            return []
        known = self._losses.get(run.id)
        if known is None or known[0] != size:
            known = self._losses[run.id] = size, [loss for _, loss in losses(file)]
        return known[1]


def phase_text(summary: Summary) -> str:
    """What a run does now, as in `smalti run ls`; the message of one that has ended."""
    if summary.status.condition != "running":
        return summary.status.message
    if summary.phase is not None:
        return str(summary.phase)
    return "training" if summary.step else "starting"
