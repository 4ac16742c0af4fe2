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
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from smalti.data.buckets import CropAspect, CropStyle, ResolutionType
from smalti.data.catalog import Catalog
from smalti.errors import ConfigError, Problem
from smalti.files import parse_json
from smalti.packages import package_of_storage

# Keys of the reference trainer that need no counterpart here, and why.
_WITHOUT_EFFECT: Mapping[str, str] = {
    "preserve_data_backend_cache": "listings are compared by etag, and only what changed is read again",
    "skip_file_discovery": "listings are compared by etag, and only what changed is read again",
    "metadata_update_interval": "the index is written once, when the scan ends",
    "scan_for_errors": "every scan looks for errors",
    "delete_problematic_images": "nothing is ever deleted; broken pictures are set aside in a quarantine list",
    "delete_unwanted_images": "nothing is ever deleted; pictures that are too small are left out",
    "read_batch_size": "reading is spread over threads by itself",
    "write_batch_size": "writing is batched by itself",
    "vae_batch_size": "encoding is batched by itself",
    "text_encoder_batch_size": "encoding is batched by itself",
    "hash_filenames": "cache entries are named by their content",
}

# Keys that change what is trained on: ignoring them would be worse than refusing them.
_REFUSED: Mapping[str, str] = {
    "train_batch_size": "all datasets share one batch size; set the option train_batch_size instead",
    "probability": "datasets are sampled in proportion to their size; use repeats to weigh them",
    "vae_cache_disable": "pictures of all datasets are encoded alike; set the option vae_cache_disable instead",
    "text_cache_disable": "texts of all datasets are encoded alike; set the option text_cache_disable instead",
    "video": "only pictures are trained on; remove this dataset or disable it",
}

_WITH_PICTURES = ("image", "eval")

_SWITCHES = ("disabled", "disable")

_CROP_ALONE: Mapping[str, object] = {"crop_style": "random", "crop_aspect": "square"}
"""What the reference trainer understands by `crop` alone."""

CAPTION_STRATEGIES = ("textfile", "filename", "instanceprompt")
"""Where captions may come from besides a metadata table."""

# Beyond these a resolution is surely in the wrong unit.
_MOST_MEGAPIXELS = 64
_FEWEST_PIXELS = 4


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _crop_style(value: object) -> object:
    value = _lowered(value)
    return "center" if value == "centre" else value


Word = Annotated[str, BeforeValidator(_lowered)]
Folder = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class JsonTable(BaseModel):
    """The `json` block: a JSON-lines table with one picture per line.

    `path` is a file (relative to the current directory); without it, metadata.jsonl inside the dataset. The columns for width
    and height may be absent from a line; then the picture's header is read. They give the size as it is seen, after EXIF
    rotation. The caption may be a text or a list of texts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Folder | None = None
    filename_column: str = "filename"
    caption_column: str = "caption"
    width_column: str = "width"
    height_column: str = "height"


class DatasetSpec(BaseModel):
    """One dataset, checked and complete. Sizes are in the unit of `resolution`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names files of the run directory, hence letters, digits, dot, dash and underscore only."""
    type: str = "local"
    """The storage by name."""
    dataset_type: Literal["image", "eval", "text_embeds", "image_embeds"] = "image"
    """What it holds. Only "image" datasets are trained on; the loss is measured on "eval" datasets; the others say where
    caches live."""

    instance_data_dir: Folder | None = None
    metadata_backend: Word = "discovery"
    """Where names, sizes and captions come from: the folder itself, or a table."""
    json_table: JsonTable = Field(JsonTable(), alias="json")

    caption_strategy: Word = "textfile"
    """textfile: NAME.txt beside the picture. filename: its name. instanceprompt: one prompt for all. Or the name of a
    metadata backend that has captions."""
    disable_multiline_split: bool = False
    """Take a text file of several lines as one caption; otherwise each line is a caption of its own."""
    instance_prompt: str | None = None
    prepend_instance_prompt: bool = False
    only_instance_prompt: bool = False

    resolution: float = Field(1024.0, gt=0)
    resolution_type: Annotated[ResolutionType, BeforeValidator(_lowered)] = "pixel_area"
    crop: bool = True
    """Crop what juts out of a bucket of an image's own aspect ratio; otherwise the image is stretched to that bucket. An entry
    that says `crop = true` and nothing else about it means a square at a random place, as in SimpleTuner."""
    crop_style: Annotated[CropStyle, BeforeValidator(_crop_style)] = "center"
    crop_aspect: Annotated[CropAspect, BeforeValidator(_lowered)] = "preserve"
    minimum_image_size: float = Field(0.0, ge=0)

    repeats: int = Field(0, ge=0)
    """How often a picture is seen in an epoch besides the first time."""
    max_num_samples: int | None = Field(None, ge=1)
    """Use only this many pictures, always the same ones for the same id."""

    cache_dir_vae: str | None = None
    image_embeds: str | None = None
    text_embeds: str | None = None
    """Ids of the image_embeds and text_embeds entries that hold this dataset's caches."""
    default: bool = False
    cache_dir: str | None = None
    """Where latents of this dataset (`cache_dir_vae`) and all texts (`cache_dir` of a text_embeds entry) are kept."""

    storage_options: Mapping[str, object] = Field(default={}, repr=False)
    """The storage's own keys (`StorageEntry.keys`), for it to check the values. Never shown: they may hold secrets."""
    metadata_options: Mapping[str, object] = {}
    """The block that is named after the metadata backend ("parquet": {...}), for that backend to check."""
    notices: tuple[str, ...] = ()
    """What the user should know about keys that have no effect."""

    @property
    def has_pictures(self) -> bool:
        return self.dataset_type in _WITH_PICTURES

    @property
    def uses_instance_prompt(self) -> bool:
        """Whether `instance_prompt` is in the captions."""
        strategy = self.caption_strategy == "instanceprompt"
        return self.has_pictures and (strategy or self.prepend_instance_prompt or self.only_instance_prompt)


# What may stand in a file: every field but those that `parse_datasets` fills itself.
_FILE_KEYS = tuple(
    info.alias or name
    for name, info in DatasetSpec.model_fields.items()
    if name not in ("storage_options", "metadata_options", "notices")
)


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
        reader.problems.append(Problem(message="no dataset with pictures is enabled", where=where, fix="add one"))
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
    named = [spec.id for spec in specs if spec.type != "local" and not spec.has_pictures]
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
        if spec.has_pictures:
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
            if key in _FILE_KEYS:
                values[key] = value
            elif key in own_keys:
                options[key] = value
            elif key == metadata:
                values["metadata_options"] = value
            elif key in _WITHOUT_EFFECT:
                notices.append(f"{place}: {key} has no effect: {_WITHOUT_EFFECT[key]}")
            elif key in _REFUSED:
                self._complain(place, f"{key} is not supported for a dataset", _REFUSED[key])
            elif key not in _SWITCHES and not (storage not in self.catalog.storages and key.startswith(f"{storage}_")):
                self._complain(place, f"unknown key {key!r}", _nearest(key, (*_FILE_KEYS, *own_keys)))
        if _is_on(entry.get("crop", False)):
            values = {**_CROP_ALONE, **values}
        self._check_choice(place, "type", storage, self.catalog.storages)
        kind = values.setdefault("dataset_type", "image")
        if kind in _WITH_PICTURES:
            self._check_choice(place, "metadata_backend", metadata, self.catalog.metadata)
            if storage == "local" and "instance_data_dir" not in values:
                self._complain(place, "instance_data_dir is missing", "name the folder that holds the pictures")
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
        if spec.resolution_type == "area" and spec.resolution > _MOST_MEGAPIXELS:
            message = f"resolution {spec.resolution:g} with resolution_type 'area' means as many megapixels"
            self._complain(place, message, "give megapixels (1024x1024 is 1.05), or set resolution_type to 'pixel_area'")
        elif spec.resolution_type != "area" and spec.resolution < _FEWEST_PIXELS:
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
    return any(_is_on(entry.get(key, False)) for key in _SWITCHES)


def _is_on(value: object) -> bool:
    """Whether a switch is on. "false" in quotes is false, as everywhere."""
    return str(value).lower() not in ("false", "0", "no", "off", "none")


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known here: {', '.join(known)}" if known else ""
