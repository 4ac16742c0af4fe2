"""Parse dataset entries into `DatasetSpec`s, and report every problem with them at once.

What an entry leaves out comes from the global options (`DataDefaults`).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from smalti.config import package_of_storage
from smalti.data.buckets import CropAspect, CropStyle, ResolutionType
from smalti.data.datasets.catalog import Catalog
from smalti.data.datasets.spec import ENTRY_KEYS, TYPES_WITH_IMAGES, DatasetSpec
from smalti.errors import ConfigError, Problem
from smalti.system import parse_json

# Keys of SimpleTuner that are accepted and have no effect, and why.
WITHOUT_EFFECT: Mapping[str, str] = {
    "preserve_data_backend_cache": "listings are compared by etag, and only what changed is read again",
    "skip_file_discovery": "listings are compared by etag, and only what changed is read again",
    "metadata_update_interval": "the index is written once, when the scan ends",
    "scan_for_errors": "every scan looks for errors",
    "delete_problematic_images": "nothing is ever deleted; unreadable images are listed in a quarantine file",
    "delete_unwanted_images": "nothing is ever deleted; images that are too small are left out",
    "read_batch_size": "reading uses several threads automatically",
    "write_batch_size": "writing is batched automatically",
    "vae_batch_size": "encoding is batched automatically",
    "text_encoder_batch_size": "encoding is batched automatically",
    "hash_filenames": "cache entries are named by their content",
}

# Keys that change what is trained on, so they are refused instead of ignored.
REFUSED: Mapping[str, str] = {
    "train_batch_size": "all datasets share one batch size; set the option train_batch_size instead",
    "probability": "datasets are sampled in proportion to their size; use repeats to weight them",
    "vae_cache_disable": "all datasets are cached alike; set the option vae_cache_disable instead",
    "text_cache_disable": "all datasets are cached alike; set the option text_cache_disable instead",
    "video": "videos cannot be trained on; remove this dataset or disable it",
}

SWITCHES = ("disabled", "disable")

_CROP_ALONE: Mapping[str, object] = {"crop_style": "random", "crop_aspect": "square"}
"""What `crop: true` alone means in SimpleTuner."""

CAPTION_STRATEGIES = ("textfile", "filename", "instanceprompt")
"""Sources of captions other than a metadata table."""

# Outside of these limits a resolution is surely in the wrong unit.
_MAX_MEGAPIXELS = 64
_MIN_PIXELS = 4


@dataclass(frozen=True, kw_only=True)
class DataDefaults:
    """The global options that apply to every dataset whose entry does not override them.

    A dataset with a metadata table takes its captions from the table unless its entry names a `caption_strategy`. None means
    the default of `DatasetSpec`.
    """

    caption_strategy: str = "textfile"
    instance_prompt: str | None = None
    prepend_instance_prompt: bool = False
    only_instance_prompt: bool = False
    resolution: float = 1024.0
    resolution_type: ResolutionType = "pixel_area"
    crop: bool | None = None
    crop_style: CropStyle | None = None
    crop_aspect: CropAspect | None = None
    minimum_image_size: float = 0.0


def load_backend_config(path: Path) -> list[dict[str, object]]:
    """Returns the entries of a multidatabackend.json, unchecked. Raises ConfigError, with the line of a syntax error."""
    try:
        content = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(message=message, where=str(path), fix="check data_backend_config")]) from error
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        fix = "fix the syntax error; a common cause is an extra or missing comma just before it"
        raise ConfigError([Problem(message=error.msg, where=place, fix=fix)]) from error
    except ValueError as error:
        raise ConfigError([Problem(message=str(error), where=str(path), fix="fix the file")]) from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        message = "must be a list of objects, one per dataset"
        raise ConfigError([Problem(message=message, where=str(path), fix='write [{"id": ...}, {"id": ...}]')])
    return content


def parse_datasets(
    entries: Sequence[Mapping[str, object]], *, where: str, defaults: DataDefaults, catalog: Catalog | None = None
) -> tuple[tuple[DatasetSpec, ...], tuple[Problem, ...]]:
    """Check dataset entries; returns the enabled ones, in order of their ids, and every problem found.

    The first part holds only entries without a problem, so use it only when the second is empty. `where` names the source
    for messages; `catalog` says which storages and metadata backends there are (the built-in ones if not given).
    """
    parser = _EntryParser(where=where, defaults=defaults, catalog=catalog or Catalog())
    enabled = [(position, entry) for position, entry in enumerate(entries) if not _disabled(entry)]
    for position, entry in enabled:
        parser.read(position, entry)
    parser.check_references()
    if not any(entry.get("dataset_type", "image") == "image" for _, entry in enabled):
        parser.problems.append(
            Problem(message="no dataset with images is enabled", where=where, fix="add a dataset with images, or enable one")
        )
    return tuple(sorted(parser.specs, key=lambda spec: spec.id)), tuple(parser.problems)


@dataclass(kw_only=True)
class _EntryParser:
    """Parses entries one by one, and collects their problems."""

    where: str
    defaults: DataDefaults
    catalog: Catalog
    specs: list[DatasetSpec] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    ids: set[object] = field(default_factory=set)

    def read(self, position: int, entry: Mapping[str, object]) -> None:
        name = entry.get("id")
        place = f"{self.where}: dataset {name!r}" if isinstance(name, str) else f"{self.where}: entry {position + 1}"
        before = len(self.problems)
        if name in self.ids:
            self._add_problem(place, "this id is used twice", "give every dataset a unique id")
        if isinstance(name, str):
            self.ids.add(name)
        values = self._split_keys(place, {key: value for key, value in entry.items() if value is not None})
        try:
            spec = DatasetSpec.model_validate(values)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                self._add_problem(place, f"{'.'.join(map(str, one['loc']))}: {one['msg']}")
            return
        if spec.has_images:
            self._check_captions(place, spec)
            self._check_sizes(place, spec)
        if len(self.problems) == before:
            self.specs.append(spec)

    def check_references(self) -> None:
        """Checks that need all entries: references from one to another, and the default."""
        for kind in ("image_embeds", "text_embeds"):
            known = {spec.id for spec in self.specs if spec.dataset_type == kind}
            invalid = self.ids - {spec.id for spec in self.specs}  # reported already
            for spec in self.specs:
                target = getattr(spec, kind)
                if target is not None and target not in known | invalid:
                    message = f"{kind}: no {kind} entry has the id {target!r}"
                    self._add_problem(f"{self.where}: dataset {spec.id!r}", message, _nearest(target, known))
        defaults = [spec.id for spec in self.specs if spec.dataset_type == "text_embeds" and spec.default]
        if len(defaults) > 1:
            message = f"several text_embeds entries are marked as default: {', '.join(defaults)}"
            self._add_problem(self.where, message, "keep 'default' in only one of them")

    def _split_keys(self, place: str, entry: Mapping[str, object]) -> dict[str, object]:
        """Returns all values of an entry: with defaults, keys of plugins apart, and notices for keys without effect."""
        storage = str(entry.get("type", "local"))
        storage_keys = self.catalog.storages[storage].keys if storage in self.catalog.storages else ()
        metadata = str(entry.get("metadata_backend", "discovery")).lower()
        values: dict[str, object] = {key: value for key, value in vars(self.defaults).items() if value is not None}
        if metadata in self.catalog.tables:
            values["caption_strategy"] = metadata
        options: dict[str, object] = {}
        notices: list[str] = []
        for key, value in entry.items():
            if key in ENTRY_KEYS:
                values[key] = value
            elif key in storage_keys:
                options[key] = value
            elif key == metadata:
                values["metadata_options"] = value
            elif key in WITHOUT_EFFECT:
                notices.append(f"{place}: {key} has no effect: {WITHOUT_EFFECT[key]}")
            elif key in REFUSED:
                self._add_problem(place, f"{key} is not supported for a dataset", REFUSED[key])
            elif key not in SWITCHES and not (storage not in self.catalog.storages and key.startswith(f"{storage}_")):
                self._add_problem(place, f"unknown key {key!r}", _nearest(key, (*ENTRY_KEYS, *storage_keys)))
        if _is_on(entry.get("crop", False)):
            values = {**_CROP_ALONE, **values}
        self._check_choice(place, "type", storage, self.catalog.storages)
        kind = values.setdefault("dataset_type", "image")
        if kind in TYPES_WITH_IMAGES:
            self._check_choice(place, "metadata_backend", metadata, self.catalog.metadata)
            if storage == "local" and "instance_data_dir" not in values:
                self._add_problem(place, "instance_data_dir is missing", "set it to the folder of the images")
        return {**values, "storage_options": options, "notices": tuple(notices)}

    def _check_captions(self, place: str, spec: DatasetSpec) -> None:
        strategy = spec.caption_strategy
        tables = self.catalog.tables
        if strategy in tables and strategy != spec.metadata_backend:
            fix = f"set metadata_backend to {strategy!r}, or choose another caption_strategy"
            self._add_problem(place, f"caption_strategy {strategy!r} needs the metadata_backend of the same name", fix)
        self._check_choice(place, "caption_strategy", strategy, [*CAPTION_STRATEGIES, *sorted(tables)])
        if not spec.instance_prompt:
            for key, wanted in (
                ("caption_strategy=instanceprompt", strategy == "instanceprompt"),
                ("prepend_instance_prompt", spec.prepend_instance_prompt),
                ("only_instance_prompt", spec.only_instance_prompt),
            ):
                if wanted:
                    self._add_problem(
                        place, f"{key} needs an instance_prompt", "--instance_prompt=TEXT, or set instance_prompt in the entry"
                    )

    def _check_sizes(self, place: str, spec: DatasetSpec) -> None:
        if spec.resolution_type == "area" and spec.resolution > _MAX_MEGAPIXELS:
            message = f"resolution {spec.resolution:g} with resolution_type 'area' is in megapixels, which is too large"
            self._add_problem(place, message, "use megapixels (1024x1024 is 1.05), or set resolution_type to 'pixel_area'")
        elif spec.resolution_type != "area" and spec.resolution < _MIN_PIXELS:
            message = (
                f"resolution {spec.resolution:g} with resolution_type {spec.resolution_type!r} is in pixels, which is too small"
            )
            self._add_problem(place, message, "use pixels, or set resolution_type to 'area' for megapixels")

    def _check_choice(self, place: str, key: str, value: str, known: Collection[str]) -> None:
        if value not in known:
            if package := package_of_storage(value):
                self.problems.append(package.problem(f"{key}: {value!r} belongs to {package.distribution}", place))
            else:
                self._add_problem(place, f"{key}: {value!r} is unknown", _nearest(value, known))

    def _add_problem(self, place: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(message=message, where=place, fix=fix))


def _disabled(entry: Mapping[str, object]) -> bool:
    """Whether an entry is disabled."""
    return any(_is_on(entry.get(key, False)) for key in SWITCHES)


def _is_on(value: object) -> bool:
    """Whether a boolean value is true. The text "false" is false, as in all options."""
    return str(value).lower() not in ("false", "0", "no", "off", "none")


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known values: {', '.join(known)}" if known else ""
