"""What the formulas need to know of a model: numbers of parameters, activations and operations, counted once.

Importing this module imports no torch; `smalti_plan.counting` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from smalti import FrozenStorage


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """One repeated block. `saved` are the bytes that the backward pass needs of one sample, `inputs` those of its inputs alone.

    `saved` counts what the block itself makes. With recomputation only `inputs` stay until the backward pass reaches it.
    `products` are the results of matrix products and attention, which selective recomputation keeps as well. `copied` are the
    bytes of its weights that autocast casts, whatever the size of the batch.

    `extra` is what its backward pass needs at its peak beyond `saved`. `again` is what forward and backward pass need together
    when it is recomputed. Both are without `copied` and the gradients of weights; 0: not counted.
    """

    path: str
    parameters: int
    trained: int
    saved: int = 0
    inputs: int = 0
    copied: int = 0
    products: int = 0
    extra: int = 0
    again: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """One training sample of one image size: bytes, and floating-point operations of the forward pass.

    Outside of the blocks the backward pass needs `saved` bytes, and autocast copies `copied` bytes of weights. `operations`
    counts the operations that torch dispatches in a forward pass. `text_tokens` is the longest row that conditions it (0: there
    is none), `source` in words where the size of the image is from. Terms of the loss make a micro-batch go through the model
    in several `turns`, each of `trained_passes` forward passes that have a backward pass; `other_passes` in all have none.
    """

    width: int
    height: int
    flops: int
    saved: int
    copied: int
    operations: int
    blocks: tuple[BlockFacts, ...]
    text_tokens: int = 0
    source: str = ""
    trained_passes: int = 1
    other_passes: int = 0
    turns: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as it is trained. `frozen` is how the parameters that do not train are kept, `smaller` are other ways; `buffers`
    are bytes, and `indivisible` says that the model cannot be sharded.

    `largest` counts the parameters of the largest tensor, `outside` those that are in no block, `outside_trained` those of
    these that train. `tensors` counts the tensors that train, `factors` the numbers in a row and a column of each of them over
    its last two dimensions, or in a vector; `flattened_factors` those over the first one and all others, where these are fewer.
    """

    family: str
    parameters: int
    trained: int
    frozen: FrozenStorage
    buffers: int
    largest: int
    sample: SampleFacts
    tensors: int = 0
    factors: int = 0
    flattened_factors: int = 0
    outside: int = 0
    outside_trained: int = 0
    indivisible: bool = False
    smaller: tuple[FrozenStorage, ...] = ()

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> ModelFacts:
        """What `as_json` returned. Raises TypeError or KeyError for anything else."""
        sample = dict(cast(Mapping[str, object], values["sample"]))
        blocks = tuple(BlockFacts(**each) for each in cast(list[dict[str, int]], sample.pop("blocks")))  # type: ignore[arg-type]
        frozen, *smaller = (FrozenStorage(**each) for each in (values["frozen"], *values["smaller"]))  # type: ignore[misc]
        made = {"sample": SampleFacts(**sample, blocks=blocks), "frozen": frozen, "smaller": tuple(smaller)}  # type: ignore[arg-type]
        return cls(**{**values, **made})  # type: ignore[arg-type]
