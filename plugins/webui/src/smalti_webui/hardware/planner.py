"""The planner's answer, `smalti plan --json`, as a ranked table with a bar of memory for each way to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.parallel import device_models

PARTS = ("parameters", "gradients", "optimizer", "ema", "activations", "gathered", "temporaries", "frozen")
"""The parts of the peak, in the order of the bar."""
WIDTH = 1000
"""Units of a bar."""
SHOWN = 8
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """One part of a bar. `x` and `width` are in units of the bar; `place` selects the colour."""

    name: str
    place: int
    bytes: int
    x: float
    width: float

    @property
    def gib(self) -> str:
        return f"{self.bytes / _GIB:.2f}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train. `index` is its place among all of the same number of devices."""

    index: int
    name: str
    title: str
    recompute: str
    batch: str
    level: str
    memory: str
    parts: tuple[BarPart, ...]
    limit: float
    """Where the memory of the device ends, in units of the bar."""
    least: float
    most: float
    """Where the range of the peak begins and ends."""
    peak_phase: str
    seconds: str
    samples_per_second: float
    limited_by: str
    counted_by: str
    flags: str
    options: Mapping[str, object]
    configured: bool
    error: str = ""
    host_gib: float = 0.0

    @property
    def mark(self) -> str:
        """A sign beside the word, so that colour is not needed."""
        return {"fits": "✓", "tight": "!", "does not fit": "✗", "fails": "✗"}[self.level]

    @property
    def summary(self) -> str:
        """The bar in words."""
        parts = ", ".join(f"{part.name} {part.gib} GiB" for part in self.parts)
        return f"{self.title}: {self.memory} GiB per GPU at the peak in the {self.peak_phase}: {parts}"

    def gib_of(self, name: str) -> str:
        """The size of one part, for the table."""
        return next((part.gib for part in self.parts if part.name == name), "0.00")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The ways to train on a number of devices, best first. `best` has one of each strategy at least."""

    ranks: int
    rows: tuple[Row, ...]
    best: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """What the page shows of a plan."""

    device: str
    device_memory: str
    sizes: tuple[Size, ...]
    allowances: tuple[str, ...]
    notices: tuple[str, ...]


def device_names() -> dict[str, str]:
    """Titles of the devices that can be planned for, by the name that --gpu takes."""
    known = {name: model.title for name, model in device_models().items()}
    return {"detected": "this node's accelerator", **known, "cpu": "this node's processors"}


def view_of(plan: Mapping[str, Any]) -> PlanView:
    """The page of a plan's JSON. Raises KeyError, TypeError or ValueError for anything else."""
    own = plan["configured"]
    sizes = [_size(int(ranks), entries, own, plan) for ranks, entries in plan["ranks"].items()]
    device = plan["device"]
    return PlanView(
        device=str(device["title"]),
        device_memory=f"{device['memory'] / _GIB:.1f}",
        sizes=tuple(sizes),
        allowances=tuple(_allowance(each) for each in plan["allowances"]),
        notices=tuple(map(str, plan["notices"])),
    )


def _allowance(each: Mapping[str, Any]) -> str:
    unit, factor = ("%", 100.0) if each["share"] else ("GiB", 1 / _GIB)
    return f"{each['name']} {each['least'] * factor:.2g} to {each['most'] * factor:.2g} {unit} ({each['source']})"


def _size(ranks: int, entries: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> Size:
    fitting = [each["bytes"]["most"] for each in entries if each["fit"] != "does not fit"]
    scale = max([plan["device"]["memory"], *fitting]) * 1.02
    rows = [_row(index, each, each == own, scale) for index, each in enumerate(entries)]
    return Size(ranks=ranks, rows=tuple(rows), best=tuple(_best(rows)))


def _row(index: int, each: Mapping[str, Any], configured: bool, scale: float) -> Row:
    error, size = each["error"], each["bytes"]
    seconds = each["seconds_per_step"]
    unit = WIDTH / scale
    return Row(
        index=index,
        name=str(each["strategy"]),
        title=str(each["title"]),
        recompute=str(each["recompute"]),
        batch=f"{each['micro_batch']}x{each['accumulation']}",
        level="fails" if error else str(each["fit"]),
        memory=f"{size['least'] / _GIB:.1f}-{size['most'] / _GIB:.1f}",
        parts=tuple(_parts(each["phases"][each["peak_phase"]], unit)),
        limit=round(min(WIDTH, size["device"] * unit), 1),
        least=round(min(WIDTH, size["least"] * unit), 1),
        most=round(min(WIDTH, size["most"] * unit), 1),
        peak_phase=str(each["peak_phase"]),
        seconds=f"{seconds['least']:.2g}-{seconds['most']:.2g}",
        samples_per_second=float(each["samples_per_second"]),
        limited_by=str(each["limited_by"]),
        counted_by="formula" if each["counted_by"] == "formula" else "rehearsal",
        flags=str(each["flags"]),
        options=each["options"],
        configured=configured,
        error=f"would fail in the {error['phase']}: {error['message']}" if error else "",
        host_gib=each["host_bytes_per_node"] / _GIB,
    )


def _parts(phase: Mapping[str, Any], unit: float) -> Iterator[BarPart]:
    x = 0.0
    for place, name in enumerate(PARTS):
        size = int(phase.get(name, 0))
        if size:
            width = min(size * unit, WIDTH - x)
            yield BarPart(name=name, place=place, bytes=size, x=round(x, 1), width=round(width, 1))
            x += width


def _best(rows: Sequence[Row]) -> list[Row]:
    """The best of each strategy, the configured one, and more of those that fit, up to `SHOWN`."""
    firsts = {row.name: row.index for row in reversed(rows)}
    chosen = {row.index for row in rows if firsts[row.name] == row.index or row.error or row.configured}
    more = [row.index for row in rows if row.level == "fits" and row.index not in chosen]
    chosen.update(more[: max(0, SHOWN - len(chosen))])
    return [row for row in rows if row.index in chosen]
