"""One dataset as the user describes it: an entry of multidatabackend.json, or a [[datasets]] table.

`parse_datasets` reads all entries and reports everything that is wrong with them at once. What an entry leaves out comes
from the global options (`DataDefaults`).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from smalti.config import package_of_storage
from smalti.data.buckets import CropAspect, CropStyle, ResolutionType
from smalti.data.datasets.catalog import Catalog
from smalti.errors import ConfigError, Problem
from smalti.system import parse_json

# Keys of the reference trainer that need no counterpart here, and why.
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

# Keys that change what is trained on: ignoring them would be worse than refusing them.
REFUSED: Mapping[str, str] = {
    "train_batch_size": "all datasets share one batch size; set the option train_batch_size instead",
    "probability": "datasets are sampled in proportion to their size; use repeats to weight them",
    "vae_cache_disable": "all datasets are cached alike; set the option vae_cache_disable instead",
    "text_cache_disable": "all datasets are cached alike; set the option text_cache_disable instead",
    "video": "videos cannot be trained on; remove this dataset or disable it",
}

_WITH_IMAGES = ("image", "eval")

SWITCHES = ("disabled", "disable")

_CROP_ALONE: Mapping[str, object] = {"crop_style": "random", "crop_aspect": "square"}
"""What the reference trainer understands by `crop` alone."""

CAPTION_STRATEGIES = ("textfile", "filename", "instanceprompt")
"""Where captions may come from besides a metadata table."""

# Beyond these a resolution is surely in the wrong unit.
_MAX_MEGAPIXELS = 64
_MIN_PIXELS = 4


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _crop_style(value: object) -> object:
    value = _lowered(value)
    return "center" if value == "centre" else value


Word = Annotated[str, BeforeValidator(_lowered)]
Folder = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


def _key(default: Any = ..., *, help: str, **checks: Any) -> Any:
    """Declare one key. `help` is its entry in the reference of dataset keys, in Markdown."""
    return Field(default, description=help, **checks)


class JsonTable(BaseModel):
    """The `json` block: a JSON-lines table with one image per line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Folder | None = _key(None, help="The table. Default: `metadata.jsonl` in the dataset's folder.")
    filename_column: str = _key("filename", help="Path of the image, relative to the dataset's folder.")
    caption_column: str = _key("caption", help="The caption, or a list of captions.")
    width_column: str = _key(
        "width",
        help="Width in pixels, after EXIF rotation. A line may leave it out; the width is then read from the image's header.",
    )
    height_column: str = _key("height", help="Height in pixels, likewise.")


class DatasetSpec(BaseModel):
    """One dataset, checked and complete. Sizes are in the unit of `resolution`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    id: str = _key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        help="Unique name of the dataset: letters, digits, dot, dash, underscore. Files of the run are named after it.",
    )
    type: str = _key("local", help="The storage.")
    dataset_type: Literal["image", "eval", "text_embeds", "image_embeds"] = _key(
        "image",
        help="`image`: trained on. `eval`: the evaluation loss is measured on it. `text_embeds`, `image_embeds`: no images; the"
        " entry says where a cache is kept.",
    )

    instance_data_dir: Folder | None = _key(
        None, help="The folder of images. Subfolders are read too; hidden files and folders are not."
    )
    metadata_backend: Word = _key(
        "discovery",
        help="Where names, sizes and captions come from. `discovery`: the folder itself. `json`: a JSON-lines table.",
    )
    json_table: JsonTable = _key(
        JsonTable(), alias="json", help="Describes the table, see below. Only with `metadata_backend: json`."
    )

    caption_strategy: Word = _key(
        "textfile",
        help="`textfile`: `NAME.txt` beside the image. `filename`: the name of the file, underscores read as spaces."
        " `instanceprompt`: `instance_prompt` for all images. `json`: the caption column of the table. Default: the option"
        " `caption_strategy`; with a table, the table.",
    )
    disable_multiline_split: bool = _key(
        False,
        help="Take a text file of several lines as one caption. Otherwise each line is a caption; each visit draws one.",
    )
    instance_prompt: str | None = _key(
        None, help="The caption of all images, or their common beginning, such as `a photo of zwx cat`."
    )
    prepend_instance_prompt: bool = _key(False, help="Put `instance_prompt` in front of every caption.")
    only_instance_prompt: bool = _key(False, help="Use `instance_prompt` alone, whatever the caption strategy finds.")

    resolution: float = _key(
        1024.0,
        gt=0,
        help="Size of the training images: pixels, or megapixels with `resolution_type: area`. Default: the option.",
    )
    resolution_type: Annotated[ResolutionType, BeforeValidator(_lowered)] = _key(
        "pixel_area",
        help="What `resolution` measures. `pixel_area`: the edge of a square of equal area. `pixel`: the shorter edge. `area`:"
        " megapixels. Default: the option.",
    )
    crop: bool = _key(
        True,
        help="Scale the image until it covers its bucket, and crop the rest. `false` stretches it to the bucket. `crop: true`"
        " with neither `crop_style` nor `crop_aspect` means a square at a random place, as in SimpleTuner.",
    )
    crop_style: Annotated[CropStyle, BeforeValidator(_crop_style)] = _key(
        "center",
        help="Which part is kept. `corner` is the top left. `random` is drawn once per image where latents are cached.",
    )
    crop_aspect: Annotated[CropAspect, BeforeValidator(_lowered)] = _key(
        "preserve", help="`preserve`: buckets near the image's own aspect ratio. `square`: one square bucket."
    )
    minimum_image_size: float = _key(
        0.0,
        ge=0,
        help="Leave out smaller images. In the unit of `resolution`; 0 keeps all. With `pixel`, the shorter edge counts.",
    )

    repeats: int = _key(
        0,
        ge=0,
        help="How often an image is seen in an epoch **in addition** to the first time: 9 means ten times, kohya's `10_`.",
    )
    max_num_samples: int | None = _key(
        None, ge=1, help="Use only this many images. The choice depends on `id` alone, so it stays the same. Default: all."
    )

    cache_dir_vae: str | None = _key(
        None, help="Folder for the latents of this dataset. Default: the option `cache_dir`, else `cache` in the run directory."
    )
    image_embeds: str | None = _key(None, help="Id of the `image_embeds` entry of this dataset.")
    text_embeds: str | None = _key(None, help="Id of the `text_embeds` entry of this dataset.")
    default: bool = _key(False, help="Mark the `text_embeds` entry that holds the texts of all datasets.")
    cache_dir: str | None = _key(None, help="Folder for the encoded texts. Only in a `text_embeds` entry.")

    storage_options: Mapping[str, object] = Field(default={}, repr=False)
    """The storage's own keys (`StorageEntry.keys`), for it to check the values. Never shown: they may hold secrets."""
    metadata_options: Mapping[str, object] = {}
    """The block that is named after the metadata backend ("parquet": {...}), for that backend to check."""
    notices: tuple[str, ...] = ()
    """What the user should know about keys that have no effect."""

    @property
    def has_images(self) -> bool:
        return self.dataset_type in _WITH_IMAGES

    @property
    def uses_instance_prompt(self) -> bool:
        """Whether `instance_prompt` is in the captions."""
        strategy = self.caption_strategy == "instanceprompt"
        return self.has_images and (strategy or self.prepend_instance_prompt or self.only_instance_prompt)


FILE_KEYS = {
    info.alias or name: info
    for name, info in DatasetSpec.model_fields.items()
    if name not in ("storage_options", "metadata_options", "notices")
}
"""What may stand in a file, by name: every field but those that `parse_datasets` fills itself."""


@dataclass(frozen=True, kw_only=True)
class DataDefaults:
    """The global options that hold for every dataset that does not say otherwise.

    A dataset with a metadata table takes its captions from there unless it names a `caption_strategy` itself. None leaves it to
    `DatasetSpec`.
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
    """The entries of a multidatabackend.json, unchecked. Raises ConfigError, with the line of a syntax error."""
    try:
        content = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(message=message, where=str(path), fix="check data_backend_config")]) from error
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        fix = "correct the JSON there; a common cause is a comma too many or too few just before"
        raise ConfigError([Problem(message=error.msg, where=place, fix=fix)]) from error
    except ValueError as error:
        raise ConfigError([Problem(message=str(error), where=str(path), fix="correct the file")]) from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        message = "must hold a list of objects, one per dataset"
        raise ConfigError([Problem(message=message, where=str(path), fix='write [{"id": ...}, {"id": ...}]')])
    return content


def parse_datasets(
    entries: Sequence[Mapping[str, object]], *, where: str, defaults: DataDefaults, catalog: Catalog | None = None
) -> tuple[tuple[DatasetSpec, ...], tuple[Problem, ...]]:
    """Check dataset entries; returns the enabled ones, in order of their ids, and every problem found.

    The first part holds only entries without a problem, so use it only when the second is empty. `where` names the source
    for messages; `catalog` says which storages and metadata backends there are (the built-in ones if not given).
    """
    reader = _Reader(where=where, defaults=defaults, catalog=catalog or Catalog())
    enabled = [(position, entry) for position, entry in enumerate(entries) if not _disabled(entry)]
    for position, entry in enabled:
        reader.read(position, entry)
    reader.check_references()
    if not any(entry.get("dataset_type", "image") == "image" for _, entry in enabled):
        reader.problems.append(Problem(message="no dataset with images is enabled", where=where, fix="add one"))
    return tuple(sorted(reader.specs, key=lambda spec: spec.id)), tuple(reader.problems)


def texts_entry(specs: Sequence[DatasetSpec]) -> DatasetSpec | None:
    """The text_embeds entry that says where all texts are kept: the default one, or the only one; None without such a one."""
    entries = [spec for spec in specs if spec.dataset_type == "text_embeds" and spec.type == "local"]
    chosen = [spec for spec in entries if spec.default] or (entries if len(entries) == 1 else [])
    return chosen[0] if chosen and chosen[0].cache_dir is not None else None


def latents_folder(spec: DatasetSpec, specs: Sequence[DatasetSpec]) -> str | None:
    """Where the latents of an image dataset are kept, if its entry says so; None where that is no local folder."""
    remote = {other.id for other in specs if other.dataset_type == "image_embeds" and other.type != "local"}
    return None if spec.image_embeds in remote else spec.cache_dir_vae


def unused_caches(specs: Sequence[DatasetSpec]) -> tuple[str, ...]:
    """A sentence about entries for caches that are accepted and do nothing, if there are any."""
    used = texts_entry(specs)
    named = [spec.id for spec in specs if spec.type != "local" and not spec.has_images]
    named += [spec.id for spec in specs if spec.type == "local" and spec.dataset_type == "text_embeds" and spec is not used]
    if not named:
        return ()
    told = "all texts are kept in one folder, and folders are local"
    return (f"without effect: {', '.join(sorted(named))}; {told} (--cache_dir, or the default text_embeds entry's cache_dir)",)


@dataclass(kw_only=True)
class _Reader:
    """Reads entries one by one and keeps what is wrong with them."""

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
            self._complain(place, "this id is used twice", "give every dataset an id of its own")
        if isinstance(name, str):
            self.ids.add(name)
        values = self._sort_out(place, {key: value for key, value in entry.items() if value is not None})
        try:
            spec = DatasetSpec.model_validate(values)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                self._complain(place, f"{'.'.join(map(str, one['loc']))}: {one['msg']}")
            return
        if spec.has_images:
            self._check_captions(place, spec)
            self._check_sizes(place, spec)
        if len(self.problems) == before:
            self.specs.append(spec)

    def check_references(self) -> None:
        """What can be told only when all entries are known."""
        for kind in ("image_embeds", "text_embeds"):
            known = {spec.id for spec in self.specs if spec.dataset_type == kind}
            faulty = self.ids - {spec.id for spec in self.specs}  # complained of already
            for spec in self.specs:
                target = getattr(spec, kind)
                if target is not None and target not in known | faulty:
                    message = f"{kind}: there is no {kind} entry with the id {target!r}"
                    self._complain(f"{self.where}: dataset {spec.id!r}", message, _nearest(target, known))
        defaults = [spec.id for spec in self.specs if spec.dataset_type == "text_embeds" and spec.default]
        if len(defaults) > 1:
            message = f"several text_embeds entries are marked as default: {', '.join(defaults)}"
            self._complain(self.where, message, "keep 'default' on one of them")

    def _sort_out(self, place: str, entry: Mapping[str, object]) -> dict[str, object]:
        """All values of an entry: defaults filled in, those for plugins apart, keys without effect turned into notices."""
        storage = str(entry.get("type", "local"))
        own_keys = self.catalog.storages[storage].keys if storage in self.catalog.storages else ()
        metadata = str(entry.get("metadata_backend", "discovery")).lower()
        values: dict[str, object] = {key: value for key, value in vars(self.defaults).items() if value is not None}
        if metadata in self.catalog.tables:
            values["caption_strategy"] = metadata
        options: dict[str, object] = {}
        notices: list[str] = []
        for key, value in entry.items():
            if key in FILE_KEYS:
                values[key] = value
            elif key in own_keys:
                options[key] = value
            elif key == metadata:
                values["metadata_options"] = value
            elif key in WITHOUT_EFFECT:
                notices.append(f"{place}: {key} has no effect: {WITHOUT_EFFECT[key]}")
            elif key in REFUSED:
                self._complain(place, f"{key} is not supported for a dataset", REFUSED[key])
            elif key not in SWITCHES and not (storage not in self.catalog.storages and key.startswith(f"{storage}_")):
                self._complain(place, f"unknown key {key!r}", _nearest(key, (*FILE_KEYS, *own_keys)))
        if _is_on(entry.get("crop", False)):
            values = {**_CROP_ALONE, **values}
        self._check_choice(place, "type", storage, self.catalog.storages)
        kind = values.setdefault("dataset_type", "image")
        if kind in _WITH_IMAGES:
            self._check_choice(place, "metadata_backend", metadata, self.catalog.metadata)
            if storage == "local" and "instance_data_dir" not in values:
                self._complain(place, "instance_data_dir is missing", "name the folder that holds the images")
        return {**values, "storage_options": options, "notices": tuple(notices)}

    def _check_captions(self, place: str, spec: DatasetSpec) -> None:
        strategy = spec.caption_strategy
        tables = self.catalog.tables
        if strategy in tables and strategy != spec.metadata_backend:
            fix = f"set metadata_backend to {strategy!r}, or choose another caption_strategy"
            self._complain(place, f"caption_strategy {strategy!r} needs the metadata_backend of that name", fix)
        self._check_choice(place, "caption_strategy", strategy, [*CAPTION_STRATEGIES, *sorted(tables)])
        if not spec.instance_prompt:
            for key, wanted in (
                ("caption_strategy=instanceprompt", strategy == "instanceprompt"),
                ("prepend_instance_prompt", spec.prepend_instance_prompt),
                ("only_instance_prompt", spec.only_instance_prompt),
            ):
                if wanted:
                    self._complain(
                        place, f"{key} needs an instance_prompt", "--instance_prompt=TEXT, or set instance_prompt in the entry"
                    )

    def _check_sizes(self, place: str, spec: DatasetSpec) -> None:
        if spec.resolution_type == "area" and spec.resolution > _MAX_MEGAPIXELS:
            message = f"resolution {spec.resolution:g} with resolution_type 'area' means as many megapixels"
            self._complain(place, message, "give megapixels (1024x1024 is 1.05), or set resolution_type to 'pixel_area'")
        elif spec.resolution_type != "area" and spec.resolution < _MIN_PIXELS:
            message = f"resolution {spec.resolution:g} with resolution_type {spec.resolution_type!r} means as many pixels"
            self._complain(place, message, "give pixels, or set resolution_type to 'area' for megapixels")

    def _check_choice(self, place: str, key: str, value: str, known: Collection[str]) -> None:
        if value not in known:
            if package := package_of_storage(value):
                self.problems.append(package.problem(f"{key}: {value!r} belongs to {package.distribution}", place))
            else:
                self._complain(place, f"{key}: {value!r} is not known", _nearest(value, known))

    def _complain(self, place: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(message=message, where=place, fix=fix))


def _disabled(entry: Mapping[str, object]) -> bool:
    """Whether an entry is switched off."""
    return any(_is_on(entry.get(key, False)) for key in SWITCHES)


def _is_on(value: object) -> bool:
    """Whether a switch is on. "false" in quotes is false, as everywhere."""
    return str(value).lower() not in ("false", "0", "no", "off", "none")


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known here: {', '.join(known)}" if known else ""
