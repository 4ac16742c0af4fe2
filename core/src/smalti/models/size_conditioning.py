"""What a training image shows of its original, for models that are conditioned on it (micro-conditioning, Podell et al. 2023).

The family of such a model overrides `encode_size_conditioning`. The size that is trained at is that of the pixels.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from smalti.diffusion import Conditioning
from smalti.models.family import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConditioning:
    """One image: it was scaled from `width` x `height` pixels, then cropped at (`left`, `top`) in pixels of the scaled image.

    `width` and `height` are those of the upright original.
    """

    width: int
    height: int
    left: int
    top: int


class TakesSizes(Protocol):
    """What a `ModelFamily` has besides, if its model is conditioned on sizes and crops."""

    def encode_size_conditioning(self, sizes: Sequence[SizeConditioning], width: int, height: int) -> Conditioning:
        """Conditioning with a leading dimension of len(sizes), on the family's device, for images of one trained size.

        Its names are others than those of `encode_captions`; `forward` gets both.
        """
        ...


def encode(
    family: ModelFamily, captions: Sequence[str], sizes: Sequence[SizeConditioning], width: int, height: int
) -> Conditioning:
    """All conditioning of samples, whose images are `width` x `height` pixels."""
    return with_size_conditioning(family, family.encode_captions(captions), sizes, width, height)


def with_size_conditioning(
    family: ModelFamily, conditioning: Conditioning, sizes: Sequence[SizeConditioning], width: int, height: int
) -> Conditioning:
    """The same for captions that are encoded already."""
    if hasattr(family, "encode_size_conditioning"):
        return conditioning | cast(TakesSizes, family).encode_size_conditioning(sizes, width, height)
    return conditioning
