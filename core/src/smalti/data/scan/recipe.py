"""What determines an index besides the files. An index of another recipe is not used."""

from __future__ import annotations

import json

from smalti.data.datasets.spec import DatasetSpec

_FORMAT = 3  # increase it when a scan finds something else in the same files
_READABLE = (2,)  # earlier formats, whose rows are still right
_LATER_FIELDS = ("caption_extension", "instance_prompt_fallback", "caption_weights")
"""Recorded only where they are set, so that the indexes of earlier versions are reused."""


def recipe_of(spec: DatasetSpec) -> bytes:
    """The recipe of the dataset's index in the present format."""
    return _recipe(spec, _FORMAT)


def reusable_recipes(spec: DatasetSpec) -> tuple[bytes, ...]:
    """The recipes of indexes from which unchanged rows are taken over."""
    return tuple(_recipe(spec, number) for number in (_FORMAT, *_READABLE))


def _recipe(spec: DatasetSpec, number: int) -> bytes:
    fields = {
        "metadata_backend", "json_table", "metadata_options", "caption_strategy",
        "disable_multiline_split", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "max_num_samples",
    }  # fmt: skip
    fields |= {name for name in _LATER_FIELDS if getattr(spec, name) != DatasetSpec.model_fields[name].default}
    places = {"caption_weights": True} if spec.caption_weights else {}  # one of several captions may be missing
    return json.dumps({"format": number} | places | spec.model_dump(mode="json", include=fields), sort_keys=True).encode()
