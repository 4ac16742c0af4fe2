"""`smalti dataset reference`: the keys of a dataset entry as Markdown, and the page docs/reference/dataset-keys.md."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from smalti.cli import Command
from smalti.data import catalog_of
from smalti.plugins import Selection, load_plugins
from smalti_data.keys import DATASET_KEYS

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Images": ("id", "type", "dataset_type", "instance_data_dir", "metadata_backend", "json"),
    "Captions": (
        "caption_strategy",
        "caption_extension",
        "instance_prompt",
        "instance_prompt_fallback",
        "prepend_instance_prompt",
        "only_instance_prompt",
        "disable_multiline_split",
        "caption_weights",
        "caption_prefix",
        "caption_suffix",
        "trigger_word",
        "caption_shuffle",
        "caption_tag_dropout_rate",
        "caption_dropout_probability",
        "caption_filter_list",
    ),
    "Size and crop": (
        "resolution",
        "resolution_type",
        "crop",
        "crop_aspect",
        "crop_aspect_buckets",
        "max_upscale_threshold",
        "crop_style",
        "flip_probability",
        "minimum_image_size",
        "maximum_image_size",
        "target_downsample_size",
        "minimum_aspect_ratio",
        "maximum_aspect_ratio",
    ),
    "Weight among the datasets": (
        "is_regularisation_data",
        "repeats",
        "probability",
        "start_epoch",
        "start_step",
        "end_epoch",
        "end_step",
        "max_num_samples",
    ),
    "Caches": ("cache_dir_vae", "image_embeds", "text_embeds", "default", "cache_dir", "preserve_data_backend_cache"),
}
"""Every key in the section under which it is shown."""

_INTRODUCTION = (
    "# Keys of a dataset",
    "",
    "All keys of an entry in a dataset file, with their defaults. [Datasets](../datasets.md) says what to use them for.",
    "This page is generated: `smalti dataset reference > docs/reference/dataset-keys.md`.",
)
_TYPES = {bool: "true \\| false", int: "integer", float: "number", Path: "path"}
_NONE = type(None)


@click.command(cls=Command, examples=("smalti dataset reference",))
def reference() -> None:
    """Print all keys of a dataset entry as Markdown."""
    click.echo(dataset_reference(), nl=False)


def dataset_reference() -> str:
    """Returns the page: all keys of a dataset entry."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from _INTRODUCTION
    for title, keys in SECTIONS.items():
        yield from ("", f"## {title}", "", *_table((key, DATASET_KEYS[""][key]) for key in keys))
    yield from ("", "`disabled: true` (or `disable`) switches an entry off.")
    catalog = catalog_of(load_plugins(Selection()))
    columns = {catalog.columns[name].title: keys.model_fields for name, keys in catalog.column_keys.items()}
    for title, fields in {**DATASET_KEYS, **columns}.items():
        if title:
            note = ("In the entry or its `huggingface` block, with those above.", "") if "huggingface" in title else ()
            yield from ("", f"## {title}", "", *note, *_table(fields.items()))


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield from ("| key | value | default | meaning |", "|---|---|---|---|")
    for key, field in fields:
        yield f"| `{key}` | {_kind(field.annotation)} | {_default(field)} | {field.description} |"


def _kind(annotation: object) -> str:
    """The type of a value, for the table."""
    if get_origin(annotation) in (Union, types.UnionType):
        return _kind(next(each for each in get_args(annotation) if each is not _NONE))
    if get_origin(annotation) is Literal:
        return " \\| ".join(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if get_origin(annotation) is tuple:
        return "list"
    return _TYPES.get(annotation, "text") if isinstance(annotation, type) else "text"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, "", ()) or isinstance(field.default, BaseModel):
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
