"""Digests of a run's data, so that a resume can detect changes.

Three parts, because they have different consequences: the order of samples (seed and effective batch are compared separately);
the contents of the samples; and the settings for crops and repeats. All are made of digests that were computed when the indexes
and the rows by bucket were written, so no rank reads the samples for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from smalti.data.order import Order, Version
from smalti.data.scan.index import DatasetIndex

Settings = Mapping[str, Mapping[str, object]]
"""By dataset: names of keys or options, and values that JSON can hold."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Digests in hexadecimal: `order` of keys, buckets and repeats, `samples` of all contents of the index.

    `version` is that of the order; None in earlier checkpoints, whose digests were made of the samples themselves.
    """

    order: str
    samples: str
    settings: Settings
    version: Version | None = None

    @classmethod
    def of(cls, indexes: Sequence[DatasetIndex], order: Order, settings: Settings) -> Identity:
        return cls(
            order=_digest(_order_parts(indexes, order)),
            samples=_digest(_sample_parts(indexes)),
            settings=settings,
            version=order.version,
        )

    @classmethod
    def earlier(cls, indexes: Sequence[DatasetIndex], order: Order, settings: Settings) -> Identity:
        """The identity as earlier versions computed it; reads all keys."""
        return cls(order=_earlier_order(indexes, order, "order 2"), samples=_earlier_samples(indexes), settings=settings)

    @classmethod
    def read(cls, values: object) -> Identity:
        """Parses the result of `as_json`. Raises ValueError for anything else."""
        match values:
            case {"order": str(order), "samples": str(samples), "settings": dict(settings), **others}:
                match version := others.get("version"):
                    case None | 1 | 2 if all(isinstance(one, dict) for one in settings.values()):
                        return cls(order=order, samples=samples, settings=settings, version=version)
        raise ValueError(f"not a description of data: {values!r}")

    def as_json(self) -> dict[str, object]:
        values: dict[str, object] = {"order": self.order, "samples": self.samples, "settings": self.settings}
        return values if self.version is None else {**values, "version": self.version}


def first_digest(indexes: Sequence[DatasetIndex], order: Order, *, seed: int) -> str:
    """The digest in checkpoints of the first versions, which includes seed and effective batch; reads all keys."""
    return _earlier_order(indexes, order, f"order 1 {seed} {order.effective_batch}")


def _digest(parts: Iterator[object]) -> str:
    return sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _order_parts(indexes: Sequence[DatasetIndex], order: Order) -> Iterator[object]:
    for index in indexes:
        yield from ("dataset", repr(index.dataset), len(index), index.digests.keys)
    if order.schedule:
        yield from ("schedule", order.schedule)
    for content in order.buckets:
        yield from ("bucket", content.bucket)
        for part in content.parts:
            yield from (part.dataset, len(part.rows), part.digest, part.copies)


def _sample_parts(indexes: Sequence[DatasetIndex]) -> Iterator[object]:
    """Modification times are not included: a copy of a file is the same file."""
    for index in indexes:
        yield from ("dataset", repr(index.dataset), len(index))
        yield from (index.digests.keys, index.digests.content, index.digests.captions)


def _earlier_order(indexes: Sequence[DatasetIndex], order: Order, first: str) -> str:
    state = sha256(f"{first}{order.passes or ''}".encode())
    for index in indexes:
        _add_keys(state, index)
    for content in order.buckets:
        state.update(f"{content.bucket}".encode())
        for start in range(0, len(content), _CHUNK):
            state.update(content.numbers(start, start + _CHUNK).tobytes())
        for part in content.parts:
            for start in range(0, len(part.rows), _CHUNK):
                state.update(np.full(len(part.rows[start : start + _CHUNK]), int(part.copies), dtype=np.int64).tobytes())
    return state.hexdigest()


def _earlier_samples(indexes: Sequence[DatasetIndex]) -> str:
    state = sha256(b"samples 1")
    for index in indexes:
        _add_keys(state, index)
        for column in ("size", "width", "height", "content", "caption_hash"):
            for batch in index.batches(column):
                state.update(batch.columns[column].to_numpy().data)
    return state.hexdigest()


def _add_keys(state: Any, index: DatasetIndex) -> None:
    state.update(f"{index.dataset}\n".encode())
    for batch in index.batches("key"):
        state.update("\n".join([*batch.columns["key"].to_pylist(), ""]).encode())
