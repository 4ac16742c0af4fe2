"""What a training picture shows of its original, for families whose model is told (micro-conditioning, Podell et al. 2023).

A family that wants to know has a method `encode_frames`. The size that is trained at is that of the pixels.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from smalti.diffusion import Conditioning
from smalti.models.family import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One picture: it was scaled from `width` x `height` pixels, and cut `left` and `top` pixels from the scaled one's corner.

    `width` and `height` are those of the upright original.
    """

    width: int
    height: int
    left: int
    top: int


class SeesFrames(Protocol):
    """What a `ModelFamily` has besides, if its model is told of frames."""

    def encode_frames(self, frames: Sequence[Frame], width: int, height: int) -> Conditioning:
        """Conditioning with a leading dimension of len(frames), on the family's device, for pictures of one trained size.

        Its names are others than those of `encode_captions`; `forward` gets both.
        """
        ...


def encode(family: ModelFamily, captions: Sequence[str], frames: Sequence[Frame], width: int, height: int) -> Conditioning:
    """All that a model is told of samples beside the noisy pictures, which are `width` x `height` pixels."""
    return with_frames(family, family.encode_captions(captions), frames, width, height)


def with_frames(
    family: ModelFamily, conditioning: Conditioning, frames: Sequence[Frame], width: int, height: int
) -> Conditioning:
    """The same for captions that are encoded already."""
    if hasattr(family, "encode_frames"):
        return conditioning | cast(SeesFrames, family).encode_frames(frames, width, height)
    return conditioning
