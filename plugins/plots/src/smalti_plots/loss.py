"""The plot of a run's loss, from its events alone. matplotlib is imported when a plot is made."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smalti import UserError
from smalti.rundir import Event
from smalti_validation.png import write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 600
"""With more steps than this, neighbours share a point: the mean, between the smallest and the largest."""
_LOSS, _HELD_OUT, _RATE, _MARK, _BAD = "#2a6f97", "#2d6a4f", "#8a6d3b", "#6c757d", "#c1121f"


@dataclass(kw_only=True)
class History:
    """The steps of a run in order, without those that were lost because the run went back to an earlier checkpoint."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    validations: list[int] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    """The loss on held-out images, by step."""
    factors: list[str] = field(default_factory=list)
    """What this loss is multiplied with in the last evaluation, such as masks."""
    smoothed_loss: float | None = None
    """The last one that the console and `smalti run` have shown. None in events of versions that did not write it."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> History:
        """Read the events in the order of the file."""
        history = cls()
        for event in events:
            if event.step is None:
                continue
            if event.kind == "step":
                history._add_step(event, event.step)
            elif event.kind == "checkpoint":
                history.checkpoints.append(event.step)
            elif event.kind == "sample":
                history.validations.append(event.step)
            elif event.kind == "eval":
                history.evaluations[event.step] = _or_nan(event.number("loss"))
                history.factors = cast("list[str]", event.fields.get("factors", []))
        return history

    def _add_step(self, event: Event, step: int) -> None:
        if self.steps and step <= self.steps[-1]:
            kept = bisect_left(self.steps, step)
            del self.steps[kept:], self.losses[kept:], self.learning_rates[kept:]
            self.checkpoints = [mark for mark in self.checkpoints if mark < step]
            self.validations = [mark for mark in self.validations if mark < step]
            self.evaluations = {mark: loss for mark, loss in self.evaluations.items() if mark < step}
        self.steps.append(step)
        if (smoothed := event.number("smoothed_loss")) is not None:
            self.smoothed_loss = smoothed
        self.losses.append(_or_nan(event.number("loss")))
        self.learning_rates.append(_or_nan(event.number("learning_rate")))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of a thinned series: each stands for some neighbouring steps, of which only finite values count."""

    steps: list[float]
    means: list[float]
    lows: list[float]
    highs: list[float]

    @classmethod
    def of(cls, steps: list[int], values: list[float]) -> Curve:
        curve = cls(steps=[], means=[], lows=[], highs=[])
        width = math.ceil(len(steps) / MAX_POINTS)
        for start in range(0, len(steps), max(1, width)):
            finite = [value for value in values[start : start + width] if math.isfinite(value)]
            if finite:
                group = steps[start : start + width]
                curve.steps.append(sum(group) / len(group))
                curve.means.append(sum(finite) / len(finite))
                curve.lows.append(min(finite))
                curve.highs.append(max(finite))
        return curve

    def smoothed(self) -> list[float]:
        """The means, each averaged with its neighbours on both sides, so that the curve does not lag behind the losses.

        Weights fall off exponentially over about a fortieth of the curve to either side.
        """
        keep = 1 - 1 / max(1.0, len(self.means) / 40)
        before, after = _decaying_sums(self.means, keep), _decaying_sums(self.means[::-1], keep)[::-1]
        return [
            (left + right - mean) / (left_weight + right_weight - 1)
            for (left, left_weight), (right, right_weight), mean in zip(before, after, self.means, strict=True)
        ]


def _decaying_sums(values: list[float], keep: float) -> list[tuple[float, float]]:
    """For each value the weighted sum of it and all before it, and the sum of the weights."""
    sums, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        sums.append((total, weight))
    return sums


def plot_losses(events: Iterable[Event], target: Path, *, title: str = "") -> None:
    """Plot loss and learning rate over the steps and write a PNG to `target`; an earlier plot there is replaced.

    Steps whose loss was not finite are marked, so are checkpoints and validations. UserError when there is no step yet.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    history = History.of(events)
    if not history.steps:
        raise UserError("there is nothing to plot: the run has not made a step yet", fix="wait for its first step")
    figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    losses = Curve.of(history.steps, history.losses)
    _plot_losses(upper, losses, history)
    _plot_learning_rates(lower, Curve.of(history.steps, history.learning_rates))
    for axes in (upper, lower):
        axes.grid(color="#e9ecef", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=_MARK, labelcolor="#343a40", labelsize=9)
    lower.set_xlabel("step")
    loss = history.smoothed_loss
    last = f"step {history.steps[-1]:,}" + (f"   smoothed loss {loss:.4g}" if loss is not None else "")
    upper.set_title(title, loc="left", fontsize=12)
    upper.set_title(last, loc="right", fontsize=10, color="#343a40")
    rendered = BytesIO()
    figure.savefig(rendered, format="png")
    write_png(
        target, Image.open(rendered).convert("RGB"), {"plot": "loss", "step": str(history.steps[-1])}, description=title or last
    )


def _plot_losses(axes: Axes, curve: Curve, history: History) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if curve.lows != curve.highs:
        axes.fill_between(curve.steps, curve.lows, curve.highs, color=_LOSS, alpha=0.15, linewidth=0)
    if len(history.steps) == 1:
        axes.set_xlim(history.steps[0] - 1, history.steps[0] + 1)
    if len(curve.means) == 1:
        axes.plot(curve.steps, curve.means, color=_LOSS, marker="o", linestyle="none", label="loss")
    elif curve.means:
        axes.plot(curve.steps, curve.means, color=_LOSS, alpha=0.4, linewidth=0.8, label="loss")
        axes.plot(curve.steps, curve.smoothed(), color=_LOSS, linewidth=2, label="smoothed")
    held_out = {step: loss for step, loss in history.evaluations.items() if math.isfinite(loss)}
    if held_out:
        label = "held out" + "".join(f" times {name}" for name in history.factors)
        axes.plot(list(held_out), list(held_out.values()), color=_HELD_OUT, marker="o", markersize=4, label=label)
    _set_limits(axes, curve, list(held_out.values()))
    broken = [step for step, loss in zip(history.steps, history.losses, strict=True) if not math.isfinite(loss)]
    _mark(axes, broken, 0.97, "x", _BAD, "not finite")
    _mark(axes, history.checkpoints, 0.09, "^", _MARK, "checkpoint")
    _mark(axes, history.validations, 0.03, "D", _RATE, "validation")
    axes.legend(loc="upper right", fontsize=9, framealpha=0.9, edgecolor="none")


def _set_limits(axes: Axes, curve: Curve, others: list[float]) -> None:
    """Set the vertical limits by most of the losses: a few outliers must not flatten the others. Logarithmic for a wide range.

    Below them there is space for the marks.
    """
    values = sorted(curve.lows + curve.highs)
    if not values:
        axes.set_ylim(0, 1)
        return
    outliers = len(values) // 200
    low, high = values[outliers], values[-1 - outliers]
    low, high = min(low, *curve.smoothed(), *others), max(high, *curve.smoothed(), *others)
    if low > 0 and high / low > 30:
        axes.set_ylim(low / (high / low) ** 0.15, high * (high / low) ** 0.1)
        axes.set_yscale("log")
    else:
        height = high - low or abs(high) or 1.0
        axes.set_ylim(low - 0.15 * height, high + 0.1 * height)


def _mark(axes: Axes, steps: list[int], height: float, marker: str, color: str, label: str) -> None:
    """Marks at a fixed height, a fraction of the panel's. Too many to tell apart are thinned, the count is in the legend."""
    if steps:
        shown = steps[:: math.ceil(len(steps) / 200)]
        axes.plot(
            shown,
            [height] * len(shown),
            linestyle="none",
            marker=marker,
            markersize=5,
            color=color,
            transform=axes.get_xaxis_transform(),
            label=f"{label} ({len(steps):,})",
        )


def _plot_learning_rates(axes: Axes, curve: Curve) -> None:
    axes.set_ylabel("learning rate")
    axes.plot(curve.steps, curve.means, color=_RATE, linewidth=1.5, marker=None if len(curve.means) > 1 else "o")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylim(bottom=0)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
