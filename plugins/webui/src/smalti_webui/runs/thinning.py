"""A series of measurements in a fixed number of points, each with the least, the largest and the mean value.

Measurements are added one by one, so a run that is followed costs nothing more than its new events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Point:
    """Some neighbouring measurements. `total` and `count` are of the finite ones; `low` and `high` are NaN if there are none.

    `step` and `time` are those of the last measurement, `first` is the step of the first one.
    """

    first: int
    step: int
    time: float
    low: float
    high: float
    total: float
    count: int
    size: int

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def measure(self, step: int, time: float, value: float) -> None:
        """Take in a measurement after those that it has."""
        self.step, self.time = step, time
        self.size += 1
        if not math.isfinite(value):
            return
        if not self.count:
            self.low = self.high = value
        elif value < self.low:
            self.low = value
        elif value > self.high:
            self.high = value
        self.total += value
        self.count += 1

    def add(self, other: Point) -> None:
        """Take in the point after this one."""
        if other.count:
            self.low = other.low if not self.count else min(self.low, other.low)
            self.high = other.high if not self.count else max(self.high, other.high)
            self.total += other.total
            self.count += other.count
        self.size += other.size
        self.step, self.time = other.step, other.time


class Series:
    """Measurements by step. Once there are more than twice `limit` points, each two neighbours become one."""

    def __init__(self, limit: int = 1000) -> None:
        self.points: list[Point] = []
        self._limit = limit
        self._width = 1

    def add(self, step: int, time: float, value: float) -> None:
        """Add a measurement. One of an earlier step replaces those from there on: the run was resumed from before them."""
        points = self.points
        if points and points[-1].step >= step:
            self.rewind(step - 1)
        if points and points[-1].size < self._width:
            points[-1].measure(step, time, value)
            return
        new = Point(step, step, time, math.nan, math.nan, 0.0, 0, 0)
        new.measure(step, time, value)
        points.append(new)
        if len(points) > 2 * self._limit:
            self._halve()

    def rewind(self, step: int) -> None:
        """Remove what comes after a step. A point with measurements on both sides of it is removed as a whole."""
        while self.points and self.points[-1].step > step:
            self.points.pop()

    def _halve(self) -> None:
        pairs = [self.points[index : index + 2] for index in range(0, len(self.points), 2)]
        for pair in pairs:
            if len(pair) == 2:
                pair[0].add(pair[1])
        self.points = [pair[0] for pair in pairs]
        self._width *= 2

    def columns(self, limit: int) -> dict[str, list[float | int | None]]:
        """At most about `limit` points as columns, with seven digits. A value is None where no measurement is finite."""
        points = self._at_most(limit)
        return {
            "step": [point.step for point in points],
            "time": [round(point.time, 2) for point in points],
            "mean": [_short(point.mean) for point in points],
            "low": [_short(point.low) if point.count else None for point in points],
            "high": [_short(point.high) if point.count else None for point in points],
            "count": [point.count for point in points],
        }

    def _at_most(self, limit: int) -> list[Point]:
        width = max(1, math.ceil(len(self.points) / max(1, limit)))
        if width == 1:
            return self.points
        merged: list[Point] = []
        for index in range(0, len(self.points), width):
            first, *others = self.points[index : index + width]
            point = Point(first.first, first.step, first.time, first.low, first.high, first.total, first.count, first.size)
            for other in others:
                point.add(other)
            merged.append(point)
        return merged


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")
