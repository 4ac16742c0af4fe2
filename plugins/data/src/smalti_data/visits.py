"""What is random in the visit of an image, apart from its crop: the caption, whether that is dropped, whether it is mirrored.

Pure functions of the data, the seed and the number of the visit, so that `smalti dataset order` can tell what a run will see.
"""

from __future__ import annotations

from dataclasses import dataclass

from smalti.data import PreparedData
from smalti.system import derive_seed, uniform_single


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One sample of a batch. `number` is unique over the run, `key` is "DATASET/KEY".

    `caption` is the text before it is dropped.
    """

    number: int
    key: str
    caption: str
    is_flipped: bool
    is_dropped: bool


def visits_at(data: PreparedData, position: int, *, texts_cached: bool, dropout: float) -> list[Visit]:
    """Returns the samples of the global batch at a position, in the order in which ranks and micro-batches share them.

    `dropout` is the share of visits without a caption where a dataset has none of its own. Images that cannot be read, which a
    run replaces by others, are not known here.
    """
    batch, seed, found = data.order.batch(position), data.order.seed, []
    for sample, number in zip(map(data.sample, batch.samples.tolist()), batch.numbers, strict=True):
        own = sample.dataset.spec.caption_dropout_probability
        visit = Visit(
            number=number,
            key=sample.name,
            caption=sample.text(seed, epoch=batch.epoch, visit=number, cached=texts_cached),
            is_flipped=sample.is_flipped(seed, number),
            is_dropped=dropping_number(seed, number) < (dropout if own is None else own),
        )
        found.append(visit)
    return found


def dropping_number(seed: int, number: int) -> float:
    """The number that the loss compares with the share of visits without a caption: the second one of `SampleNoise.uniform`."""
    return uniform_single(derive_seed(seed, number, 1, 1))
