"""Digests of a run's data, so that a resume can detect changes.

Three parts, because they have different consequences: the order of samples (seed and effective batch are compared separately);
the contents of the samples; and the settings for crops and repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np

from smalti.data.order import Order
from smalti.data.scan.index import DatasetIndex

Settings = Mapping[str, Mapping[str, object]]
"""By dataset: names of keys or options, and values that JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Digests in hexadecimal: `order` of keys, buckets and repeats, `samples` of all contents of the index."""

    order: str
    samples: str
    settings: Settings

    @classmethod
    def of(cls, indexes: Sequence[DatasetIndex], order: Order, settings: Settings) -> Identity:
        return cls(
            order=_order_digest(indexes, order, "order 2" if order.version == 1 else "computed order"),
            samples=_samples_digest(indexes),
            settings=settings,
        )

    @classmethod
    def read(cls, values: object) -> Identity:
        """Parses the result of `as_json`. Raises ValueError for anything else."""
        match values:
            case {"order": str(order), "samples": str(samples), "settings": dict(settings)}:
                if all(isinstance(one, dict) for one in settings.values()):
                    return cls(order=order, samples=samples, settings=settings)
        raise ValueError(f"not a description of data: {values!r}")

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def first_digest(indexes: Sequence[DatasetIndex], order: Order, *, seed: int) -> str:
    """The digest in checkpoints of older versions, which includes seed and effective batch."""
    return _order_digest(indexes, order, f"order 1 {seed} {order.effective_batch}")


def _order_digest(indexes: Sequence[DatasetIndex], order: Order, first: str) -> str:
    state = sha256(first.encode())
    for index in indexes:
        state.update("\n".join([index.dataset, *index.keys(), ""]).encode())
    for content in order.buckets:
        state.update(f"{content.bucket}".encode() + content.samples.tobytes())
        for part in content.parts:
            state.update(np.full(len(part.rows), part.copies, dtype=np.int64).tobytes())
    return state.hexdigest()


def _samples_digest(indexes: Sequence[DatasetIndex]) -> str:
    """Modification times are not included: a copy of a file is the same file."""
    state = sha256(b"samples 1")
    for index in indexes:
        state.update("\n".join([index.dataset, *index.keys(), ""]).encode())
        for column in ("size", "width", "height", "content", "caption_hash"):
            for batch in index.batches(column):
                state.update(batch.columns[column].to_numpy().data)
    return state.hexdigest()
