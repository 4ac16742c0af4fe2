"""Aspect buckets: the size at which an image is trained, and how it is resized and cropped.

All images of a batch have one size, the bucket. A bucket's sides are multiples of the alignment that the model family
needs, its area is that of the resolution, and its aspect ratio is near the image's own. The image is scaled until it covers
the bucket, and the rest is cropped. Without cropping it is stretched to the bucket, which changes its aspect ratio by up to
6 % at 1024 pixels with an alignment of 64, and by up to 13 % at 512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ResolutionType = Literal["pixel", "area", "pixel_area"]
CropStyle = Literal["center", "random", "corner"]
RANDOM_CHOICES = 64
"""How finely the weights of `crop_aspect_buckets` are kept."""
CropAspect = Literal["square", "preserve", "closest", "random"]


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
        aspect_rounding: decimals to which aspect ratios are rounded, so that nearly equal ones share a bucket.
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
    aspect_rounding: int = 2
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

    def accepts(self, width: int, height: int) -> bool:
        """Whether an image of this size is large enough to train on, and of an allowed aspect ratio."""
        if not self.minimum_aspect_ratio <= width / height <= (self.maximum_aspect_ratio or math.inf):
            return False
        size = min(width, height) if self.resolution_type == "pixel" else width * height
        smallest = self.minimum_image_size if self.resolution_type == "pixel" else self._area(self.minimum_image_size)
        return size >= smallest and (not self._from_list or bool(self._allowed(width, height)))

    @property
    def choices(self) -> int:
        """How many equally likely choices there are of the bucket of an image; 1 where its size alone determines it."""
        return RANDOM_CHOICES if self._from_list and self.crop_aspect == "random" else 1

    def bucket(self, width: int, height: int, choice: int = 0) -> Bucket:
        """Returns the bucket of an image that is accepted; `choice` is one of `choices`.

        Without a list of aspects, an image and its transpose have transposed buckets.
        """
        if self._from_list:
            return self._listed(width, height, choice)
        # Long side over short side, so that tall images are rounded like wide ones (and never to zero).
        aspect = 1.0
        if not (self.crop and self.crop_aspect == "square"):
            aspect = round(max(width, height) / min(width, height), self.aspect_rounding)
        return self._of_aspect(aspect, wide=width >= height)

    @property
    def square(self) -> Bucket:
        """The bucket of a square image."""
        return self._of_aspect(1.0, wide=True)

    @property
    def listed_buckets(self) -> tuple[Bucket, ...]:
        """All buckets that images may have, where the settings list them; empty where they depend on the images."""
        if self._from_list:
            return tuple(bucket for _, _, bucket in self._aspects())
        return (self.square,) if self.crop and self.crop_aspect == "square" else ()

    @property
    def _from_list(self) -> bool:
        return self.crop and self.crop_aspect in ("closest", "random")

    def _listed(self, width: int, height: int, choice: int) -> Bucket:
        """The bucket of an image among those of `crop_aspect_buckets`."""
        allowed = self._allowed(width, height)
        if self.crop_aspect == "closest":
            return min(allowed, key=lambda each: abs(math.log(each[0] * height / width)))[2]
        rest = (choice + 0.5) / RANDOM_CHOICES * sum(weight for _, weight, _ in allowed)
        for _, weight, bucket in allowed:
            rest -= weight
            if rest < 0:
                return bucket
        return allowed[-1][2]

    def _allowed(self, width: int, height: int) -> list[tuple[float, float, Bucket]]:
        """The aspects that do not enlarge an image too much: each with its weight and its bucket."""
        most = math.inf if self.max_upscale_threshold is None else 1 + self.max_upscale_threshold
        return [one for one in self._aspects() if max(one[2].width / width, one[2].height / height) <= most]

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
    # Imported here: the command line reads the keys of datasets, and needs no numpy.
    import numpy as np

    from smalti.system import mixed

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
