"""The order of samples where datasets begin or end during the run.

The run is divided into phases, in each of which the same datasets are trained on; each phase has an order of its own, which
begins with the next epoch. Where phases begin follows from the entries alone, so a position means the same in every process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.data.order import Beginning, BucketSamples, GlobalBatch, Order
from smalti.errors import PreflightError


@dataclass(frozen=True, kw_only=True)
class Span:
    """The steps and epochs in which a dataset is trained on, counted from 1, the last ones included; None sets no limit."""

    start_step: int | None = None
    end_step: int | None = None
    start_epoch: int | None = None
    end_epoch: int | None = None

    def holds(self, place: Beginning) -> bool:
        """Whether a dataset is trained on at a position and epoch, which count from 0."""
        started = place.position + 1 >= (self.start_step or 0) and place.epoch + 1 >= (self.start_epoch or 0)
        ended = (self.end_step and place.position >= self.end_step) or (self.end_epoch and place.epoch >= self.end_epoch)
        return started and not ended

    def borders(self, order: Order) -> Iterator[int]:
        """The positions at which it may begin or end, if the order stays the same until then."""
        yield from (one for one in ((self.start_step or 0) - 1, self.end_step or 0) if one > 0)
        first = 0 if order.beginning is None else order.beginning.epoch
        yield from (order.epoch_start(one) for one in ((self.start_epoch or 0) - 1, self.end_epoch or 0) if one > first)


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """A part of the run. `left_out`: buckets that cannot fill a batch with the datasets of the phase."""

    start: Beginning
    order: Order
    left_out: tuple[BucketSamples, ...]


class ScheduledOrder(Order):
    """All batches of a run, by position; `spans` are those of the datasets, by their position.

    `buckets` are of all phases; `settings` the other arguments of `Order`.
    """

    def __init__(self, buckets: Sequence[BucketSamples], *, spans: Sequence[Span], **settings: Any) -> None:
        super().__init__(buckets, **settings)
        self.schedule += repr(list(spans))
        self._spans = tuple(spans)
        self.phases = tuple(self._phases())

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "spans": self._spans}

    def batch(self, position: int) -> GlobalBatch:
        return self._at(position).batch(position)

    def epoch_of(self, position: int) -> int:
        return self._at(position).epoch_of(position)

    def epoch_start(self, epoch: int) -> int:
        number = max(0, bisect_right(self.phases, epoch, key=lambda phase: phase.start.epoch) - 1)
        start = self.phases[number].order.epoch_start(epoch)
        later = [phase.start.position for phase in self.phases[number + 1 : number + 2]]
        return min([start, *later] + ([] if self.end is None else [self.end]))

    def replacements(self, batch: GlobalBatch, slot: int) -> Iterator[int]:
        return self._at(batch.position).replacements(batch, slot)

    def _at(self, position: int) -> Order:
        if self.end is not None and position >= self.end:
            message = f"no dataset is trained on after step {self.end}"
            raise PreflightError(message, fix="remove end_step or end_epoch of a dataset")
        number = bisect_right(self.phases, position, key=lambda phase: phase.start.position) - 1
        return self.phases[max(0, number)].order

    def _phases(self) -> Iterator[Phase]:
        place: Beginning | None = self.beginning or Beginning(position=0, epoch=0)
        while place is not None:
            active = self._active(place)
            if not any(active):
                if place.position == 0:
                    message = "no dataset is trained on from the first step"
                    raise PreflightError(message, fix="remove start_step or start_epoch of one")
                self.end = place.position
                return
            phase = self._phase(place, active)
            yield phase
            place = self._next(phase, active)

    def _active(self, place: Beginning) -> list[bool]:
        return [span.holds(place) for span in self._spans]

    def _phase(self, start: Beginning, active: Sequence[bool]) -> Phase:
        present = [
            BucketSamples(bucket=one.bucket, parts=parts)
            for one in self.buckets
            if (parts := tuple(part for part in one.parts if active[part.dataset]))
        ]
        full = [one for one in present if _samples(one) >= self.effective_batch]
        if not full:
            step = start.position + 1
            message = f"no bucket has {self.effective_batch} samples, an effective batch, of the datasets of step {step}"
            fix = "a smaller batch, more repeats of them, or other values of start_step, start_epoch, end_step and end_epoch"
            raise PreflightError(message, fix=fix)
        beginning = start if start.position else None
        order = Order(full, version=self.version, beginning=beginning, **super()._settings())
        return Phase(start=start, order=order, left_out=tuple(one for one in present if one not in full))

    def _next(self, phase: Phase, active: Sequence[bool]) -> Beginning | None:
        """Where other datasets are trained on than in this phase."""
        borders = {border for span in self._spans for border in span.borders(phase.order) if border > phase.start.position}
        for border in sorted(borders):
            epoch = phase.order.epoch_of(border)
            if phase.order.epoch_start(epoch) < border:
                epoch += 1  # the rest of the epoch is left out
            place = Beginning(position=border, epoch=epoch)
            if self._active(place) != list(active):
                return place
        return None


def _samples(content: BucketSamples) -> int:
    """As many as there are, with repeats, but not fewer because of a low probability."""
    return sum(int(len(part.rows) * max(1, part.copies)) for part in content.parts)
