"""What a training image shows of its original, for models that are conditioned on it (micro-conditioning, Podell et al. 2023).

The family of such a model overrides `encode_size_conditioning`. The size that is trained at is that of the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConditioning:
    """One image: it was scaled from `width` x `height` pixels, then cropped at (`left`, `top`) in pixels of the scaled image.

    `width` and `height` are those of the upright original.
    """

    width: int
    height: int
    left: int
    top: int

    @classmethod
    def of(cls, size: tuple[int, int], offset: tuple[int, int] = (0, 0)) -> SizeConditioning:
        """From (width, height), and (left, top) of the crop."""
        return cls(width=size[0], height=size[1], left=offset[0], top=offset[1])
