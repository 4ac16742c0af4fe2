"""Aspect buckets: the size at which an image is trained, and how it is resized and cropped.

All images of a batch have one size, the bucket. A bucket's sides are multiples of the alignment that the model family
needs, its area is that of the resolution, and its aspect ratio is near the image's own. The image is scaled until it covers
the bucket, and the rest is cropped. Without cropping it is stretched to the bucket, which changes its aspect ratio by up to
6 % at 1024 pixels with an alignment of 64, and by up to 13 % at 512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from smalti.data.datasets.crop_values import CropAspect, CropStyle, ResolutionType
from smalti.system import mixed

Sides = NDArray[np.int64]

RANDOM_CHOICES = 64
"""How finely the weights of `crop_aspect_buckets` are kept."""
ASPECT_DECIMALS = 2
"""To which aspect ratios are rounded, so that nearly equal ones share a bucket."""
REFUSED = 0
"""The class of images that the settings do not accept."""


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A size in pixels; the key of a bucket."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, kw_only=True)
class CropSettings:
    """How the images of one dataset are assigned to buckets, resized and cropped.

    Args:
        resolution: pixels, or megapixels with `resolution_type` "area".
        resolution_type: "pixel": length of the shorter edge. "area": megapixels. "pixel_area": the area of a square with this
            edge.
        alignment: both sides of a bucket are multiples of this many pixels.
        crop: crop what exceeds the bucket, instead of changing the aspect ratio a little.
        crop_aspect: with `crop`, "square" crops every image to a square and "preserve" keeps its aspect ratio. "closest" takes
            the nearest of `crop_aspect_buckets`, "random" any of them.
        crop_aspect_buckets: aspect ratios, width / height, each with its weight.
        max_upscale_threshold: with `crop_aspect_buckets`, an image is not enlarged by more than this share; None sets no limit.
        crop_style: with `crop`, where to crop: "center", "corner" (top left), or "random" (different at every visit; chosen
            once if latents are cached).
        minimum_image_size: smaller images are skipped; in the unit of `resolution`, 0 keeps all.
        maximum_image_size, target_downsample_size: with `crop`, images larger than the first are scaled to the second before
            they are cropped, but never to less than their bucket; in the unit of `resolution`, 0 scales every image to cover
            its bucket.
        minimum_aspect_ratio, maximum_aspect_ratio: images whose width / height is outside are skipped; 0 sets no limit.
    """

    resolution: float
    resolution_type: ResolutionType = "pixel_area"
    alignment: int = 64
    crop: bool = False
    crop_aspect: CropAspect = "square"
    crop_aspect_buckets: tuple[tuple[float, float], ...] = ()
    max_upscale_threshold: float | None = None
    crop_style: CropStyle = "center"
    minimum_image_size: float = 0.0
    maximum_image_size: float = 0.0
    target_downsample_size: float = 0.0
    minimum_aspect_ratio: float = 0.0
    maximum_aspect_ratio: float = 0.0

    def accepts(self, widths: Sides, heights: Sides) -> NDArray[np.bool_]:
        """Which images of these sizes are large enough to train on, and of an allowed aspect ratio."""
        aspects, widest = widths / heights, self.maximum_aspect_ratio or math.inf
        pixel = self.resolution_type == "pixel"
        size = np.minimum(widths, heights) if pixel else widths * heights
        smallest = self.minimum_image_size if pixel else self._area(self.minimum_image_size)
        accepted = (aspects >= self.minimum_aspect_ratio) & (aspects <= widest) & (size >= smallest)
        return accepted & (self._weights(widths, heights) > 0).any(axis=0) if self._from_list else accepted

    @property
    def choices(self) -> int:
        """How many equally likely choices there are of the bucket of an image; 1 where its size alone determines it."""
        return RANDOM_CHOICES if self._from_list and self.crop_aspect == "random" else 1

    def bucket(self, width: int, height: int, choice: int = 0) -> Bucket:
        """Returns the bucket of an image that is accepted; `choice` is one of `choices`.

        Without a list of aspects, an image and its transpose have transposed buckets.
        """
        if self._from_list:
            return self.listed_buckets[int(self._listed(*(np.array([each]) for each in (width, height, choice)))[0])]
        # Long side over short side, so that tall images are rounded like wide ones (and never to zero).
        aspect = 1.0
        if not (self.crop and self.crop_aspect == "square"):
            aspect = round(max(width, height) / min(width, height), ASPECT_DECIMALS)
        return self._of_aspect(aspect, wide=width >= height)

    def classes(self, widths: Sides, heights: Sides, choices: Sides) -> NDArray[np.int64]:
        """Returns a number for each image: `REFUSED` if it has no size or is not accepted.

        Images with the same number have the same bucket. There are far fewer numbers than sizes.
        """
        known = widths > 0
        widths, heights = np.maximum(widths, 1), np.maximum(heights, 1)
        if self._from_list:
            classes = self._listed(widths, heights, choices) + 1
        elif self.crop and self.crop_aspect == "square":
            classes = np.ones_like(widths)
        else:
            scaled = np.maximum(widths, heights) / np.minimum(widths, heights) * 10**ASPECT_DECIMALS
            rounded = np.rint(scaled)
            # The product is inexact: where it is too near to a tie to tell how `bucket` rounds, each size is a class.
            tied = 0.5 - np.abs(scaled - rounded) <= scaled * 2**-52
            classes = np.where(tied, -(widths << 32 | heights), rounded.astype(np.int64) << 1 | (widths >= heights))
        return np.where(known & self.accepts(widths, heights), classes, REFUSED)

    @property
    def square(self) -> Bucket:
        """The bucket of a square image."""
        return self._of_aspect(1.0, wide=True)

    @property
    def listed_buckets(self) -> tuple[Bucket, ...]:
        """All buckets that images may have, where the settings list them; empty where they depend on the images."""
        if self._from_list:
            return tuple(bucket for _, _, bucket in self._aspects)
        return (self.square,) if self.crop and self.crop_aspect == "square" else ()

    @property
    def _from_list(self) -> bool:
        return self.crop and self.crop_aspect in ("closest", "random")

    def _listed(self, widths: Sides, heights: Sides, choices: Sides) -> NDArray[np.int64]:
        """The places of the buckets of images in `listed_buckets`."""
        weights = self._weights(widths, heights)
        if self.crop_aspect == "random":
            reached = np.subtract.accumulate([(choices + 0.5) / RANDOM_CHOICES * sum(weights), *weights])[1:] < 0
            last = len(weights) - 1 - (weights[::-1] > 0).argmax(axis=0)
            chosen: Sides = np.where(reached.any(axis=0), reached.argmax(axis=0), last)
            return chosen
        quotients = np.array([aspect * heights / widths for aspect, _, _ in self._aspects])
        distances = np.where(weights > 0, np.abs(np.log(quotients)), np.inf)
        # The last bits of the logarithms of numpy depend on the processor, those of `math` do not.
        tied = (distances < distances.min(axis=0) + 1e-9).sum(axis=0) > 1
        exact = np.vectorize(math.log, otypes=[np.float64])
        distances[:, tied] = np.where(weights[:, tied] > 0, np.abs(exact(quotients[:, tied])), np.inf)
        nearest: Sides = distances.argmin(axis=0)
        return nearest

    def _weights(self, widths: Sides, heights: Sides) -> NDArray[np.float64]:
        """The weight of each listed aspect for each image; 0 where the bucket would enlarge the image too much."""
        most = math.inf if self.max_upscale_threshold is None else 1 + self.max_upscale_threshold
        enlarged = [np.maximum(bucket.width / widths, bucket.height / heights) for _, _, bucket in self._aspects]
        return np.where(np.array(enlarged) <= most, [[weight] for _, weight, _ in self._aspects], 0.0)

    @cached_property
    def _aspects(self) -> list[tuple[float, float, Bucket]]:
        """The listed aspects that have a weight: each with its weight and its bucket."""
        weighted = [(each, weight) for each, weight in self.crop_aspect_buckets if weight]
        return [(each, weight, self._of_aspect(max(each, 1 / each), wide=each >= 1)) for each, weight in weighted]

    def _of_aspect(self, aspect: float, *, wide: bool) -> Bucket:
        """The bucket of an aspect ratio, long side over short side."""
        if self.resolution_type == "pixel":
            short = self._aligned(self.resolution)
            long = self._aligned(short * aspect)
        else:
            edge = self._aligned(math.sqrt(self._area(self.resolution)))
            short = self._aligned(edge / math.sqrt(aspect))
            long = self._aligned(edge * math.sqrt(aspect))
        return Bucket(long, short) if wide else Bucket(short, long)

    def resized(self, width: int, height: int, bucket: Bucket) -> tuple[int, int]:
        """Returns width and height to scale an image to: the bucket's own, or with `crop` the smallest that cover it.

        An image larger than `maximum_image_size` is scaled to `target_downsample_size` if that is more, so that the crop is a
        part of it.
        """
        if not self.crop:
            return bucket.width, bucket.height
        covering = _covering(width, height, bucket)
        if not (self.maximum_image_size and self.target_downsample_size > self.resolution and self._exceeds(width, height)):
            return covering
        scale = min(1.0, self._scale(width, height, self.target_downsample_size))
        return max(covering[0], round(scale * width)), max(covering[1], round(scale * height))

    def offset(self, resized: tuple[int, int], bucket: Bucket, fractions: tuple[float, float] = (0.0, 0.0)) -> tuple[int, int]:
        """Returns left and top of the crop in a scaled image. `fractions`: two numbers in [0, 1) for "random"."""
        across, down = resized[0] - bucket.width, resized[1] - bucket.height
        match self.crop_style:
            case "center":
                return across // 2, down // 2
            case "corner":
                return 0, 0
            case "random":  # the last offset is as likely as any other
                return int(fractions[0] * (across + 1)), int(fractions[1] * (down + 1))

    def _exceeds(self, width: int, height: int) -> bool:
        return self._scale(width, height, self.maximum_image_size) < 1

    def _scale(self, width: int, height: int, size: float) -> float:
        """The factor by which an image is scaled to a size in the unit of `resolution`."""
        if self.resolution_type == "pixel":
            return size / min(width, height)
        return math.sqrt(self._area(size) / (width * height))

    def _area(self, size: float) -> float:
        return size * 1e6 if self.resolution_type == "area" else size * size

    def _aligned(self, length: float) -> int:
        return max(1, math.floor(length / self.alignment + 0.5)) * self.alignment


def choices_of(sizes: NDArray[np.int64], widths: NDArray[np.int32], heights: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns a choice for each image, which depends on the size of its file in bytes and on its own size alone."""
    pixels = widths.astype(np.int64) << 32 | heights
    return (mixed(sizes ^ mixed(pixels).astype(np.int64)) >> np.uint64(40)).astype(np.int64) % RANDOM_CHOICES


def _covering(width: int, height: int, bucket: Bucket) -> tuple[int, int]:
    """Returns the smallest width and height that cover a bucket, in the aspect ratio of the image."""
    # Integer arithmetic: w/W < h/H means that the width is the limit.
    if width * bucket.height < height * bucket.width:
        return bucket.width, max(bucket.height, _divide(height * bucket.width, width))
    return max(bucket.width, _divide(width * bucket.height, height)), bucket.height


def _divide(dividend: int, divisor: int) -> int:
    """Rounds to the nearest integer, halves up."""
    return (2 * dividend + divisor) // (2 * divisor)
