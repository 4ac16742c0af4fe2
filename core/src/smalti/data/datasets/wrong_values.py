"""What is wrong with the values of a dataset entry, in words: pydantic's errors, and sizes in the wrong unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from smalti.data.datasets.spec import DatasetSpec
from smalti.errors import Problem, did_you_mean

# Outside of these limits a size is surely in the wrong unit.
_MAX_MEGAPIXELS = 64
_MIN_PIXELS = 4

_SIZES = ("resolution", "minimum_image_size", "maximum_image_size", "target_downsample_size")

_WANTED: Mapping[str, str] = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "finite": "a number",
    "string": "a text",
    "path": "a path",
    "dict": "a table of keys and values",
    "model": "a table of keys and values",
}
"""What to give instead, by the beginning of pydantic's name of an error."""


def wrong_values(error: ValidationError, values: Mapping[str, object], place: str) -> Iterator[Problem]:
    """Yields a problem for each value of an entry that is not valid. `values` are those that were checked."""
    for one in error.errors(include_url=False):
        key = ".".join(map(str, one["loc"]))
        kind, details = one["type"], cast(Mapping[str, Any], one.get("ctx", {}))
        if kind == "missing":
            yield Problem(message=f"{key} is missing", where=place, fix=f"set {key}")
        elif kind == "extra_forbidden":
            yield Problem(
                message=f"unknown key {key!r}", where=place, fix="remove it; `smalti dataset reference` prints all keys"
            )
        else:
            yield Problem(message=f"{key} cannot be {one['input']!r}", where=place, fix=_fix(kind, details, one["input"]))


def _fix(kind: str, details: Mapping[str, Any], value: object) -> str:
    """Returns what to give instead of a value."""
    if kind == "literal_error":
        choices = str(details["expected"]).replace("'", "").replace(" or ", ", ")
        return f"{did_you_mean(str(value).lower(), choices.split(', '))} give one of {choices}".lstrip()
    if kind == "value_error":
        return str(details["error"])
    for bound, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if bound in details:
            return f"give a number {sign} {details[bound]:g}"
    return f"give {_WANTED.get(kind.partition('_')[0], 'another value')}"


def wrong_sizes(spec: DatasetSpec, place: str) -> Iterator[Problem]:
    """Yields a problem for each size of an image dataset that is in the wrong unit, or lacks its counterpart."""
    for key in _SIZES:
        size = cast(float, getattr(spec, key))
        if spec.resolution_type == "area" and size > _MAX_MEGAPIXELS:
            message = f"{key} {size:g} with resolution_type 'area' is in megapixels, which is too large"
            fix = f"use megapixels ({size:g}x{size:g} is {size * size / 1e6:.3g}), or set resolution_type to 'pixel_area'"
            yield Problem(message=message, where=place, fix=fix)
        elif spec.resolution_type != "area" and 0 < size < _MIN_PIXELS:
            message = f"{key} {size:g} with resolution_type {spec.resolution_type!r} is in pixels, which is too small"
            fix = f"use pixels ({size:g} megapixels is {math.sqrt(size * 1e6):.0f}), or set resolution_type to 'area'"
            yield Problem(message=message, where=place, fix=fix)
    for key, other in (("maximum_image_size", "target_downsample_size"), ("target_downsample_size", "maximum_image_size")):
        if getattr(spec, key) and not getattr(spec, other):
            fix = f"set {other} too, or remove {key}: images are then scaled to cover their bucket"
            yield Problem(message=f"{key} has no meaning without {other}", where=place, fix=fix)
    listed = spec.crop_aspect in ("closest", "random")
    if listed and not any(weight for _, weight in spec.crop_aspect_buckets):
        message = f"crop_aspect {spec.crop_aspect!r} has no aspect ratios to choose from"
        yield Problem(message=message, where=place, fix="set crop_aspect_buckets, such as [1.0, 1.5, 0.67]")
    if listed and not spec.crop:
        fix = "set crop to true, or remove crop_aspect"
        yield Problem(message=f"crop_aspect {spec.crop_aspect!r} has no meaning with crop: false", where=place, fix=fix)
    if spec.minimum_aspect_ratio > (spec.maximum_aspect_ratio or math.inf):
        message = "minimum_aspect_ratio is larger than maximum_aspect_ratio, so no image is left"
        yield Problem(message=message, where=place, fix="exchange the two, or remove one")
