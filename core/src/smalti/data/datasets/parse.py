"""Parse dataset entries into `DatasetSpec`s, and report every problem with them at once.

What an entry leaves out comes from the global options (`DataDefaults`). Its paths may have the placeholders {id},
{model_family} and {output_dir}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from smalti.config import Dialect, package_of
from smalti.data.datasets.columns import ColumnKeys
from smalti.data.datasets.crop_values import CropAspect, CropStyle, ResolutionType
from smalti.data.datasets.spec import CACHE_TYPES, ENTRY_KEYS, TYPES_WITH_IMAGES, Catalog, DatasetSpec, file_name_of
from smalti.data.datasets.wrong_values import wrong_sizes, wrong_values
from smalti.errors import ConfigError, Problem, did_you_mean
from smalti.system import parse_json, read_regular

NAMES: Mapping[str, str] = {
    "id": "the name of the dataset's files",
    "model_family": "--model_family",
    "output_dir": "--output_dir",
}
"""Every placeholder, and where its value comes from."""

TABLES = ("json", "csv", "parquet")
"""The blocks of tables, which have a `path`."""
_CACHES = ("cache_dir_vae", "cache_dir")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def fill_placeholders(
    entry: Mapping[str, object], values: Mapping[str, str | None], place: str
) -> tuple[dict[str, object], list[Problem]]:
    """Returns the entry with the placeholders in its paths replaced, and the problems.

    A folder for a cache is left out if it has a placeholder without a value: commands that only read data do not need it.
    """
    filled, problems = dict(entry), list[Problem]()
    known = {**values, "id": file_name_of(str(entry.get("id", "")))}
    for key in ("instance_data_dir", *_CACHES):
        if isinstance(path := entry.get(key), str):
            filled[key] = _filled(path, known, place, key, problems)
            if key in _CACHES and filled[key] is None:
                del filled[key]
    for key in TABLES:
        table = entry.get(key)
        if isinstance(table, Mapping) and isinstance(path := table.get("path"), str):
            filled[key] = {**table, "path": _filled(path, known, place, f"{key}.path", problems)}
    return filled, problems


def _filled(path: str, values: Mapping[str, str | None], place: str, key: str, problems: list[Problem]) -> str | None:
    """Returns the path; None if a value is missing. Adds the problems with it."""
    for name in _PLACEHOLDER.findall(path):
        if name not in NAMES:
            known = ", ".join(f"{{{each}}}" for each in (*NAMES, "env:NAME"))
            message = f"{key}: unknown placeholder {{{name}}} in {path!r}"
            problems.append(Problem(message=message, where=place, fix=f"known placeholders: {known}; or rename the folder"))
            return path
        if values.get(name) is None:
            if key not in _CACHES:
                message = f"{key}: {{{name}}} has no value"
                problems.append(Problem(message=message, where=place, fix=f"give {NAMES[name]}"))
            return None
    return _PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), path)


SWITCHES = ("disabled", "disable")

_CROP_ALONE: Mapping[str, object] = {"crop_style": "random", "crop_aspect": "square"}
"""What `crop: true` alone means in SimpleTuner."""

CAPTION_STRATEGIES = ("textfile", "filename", "instanceprompt")
"""Sources of captions other than a metadata table."""
WITH_TEXTS = ("webdataset", "huggingface")
"""Metadata backends whose containers hold the text files of images too."""


@dataclass(frozen=True, kw_only=True)
class DataDefaults:
    """The options of the same names, which apply to every dataset whose entry does not override them.

    A dataset with a metadata table takes its captions from the table unless its entry names a `caption_strategy`. None means
    the default of `DatasetSpec`.
    """

    caption_strategy: str = "textfile"
    instance_prompt: str | None = None
    resolution: float = 1024.0
    resolution_type: ResolutionType = "pixel_area"
    crop: bool | None = None
    crop_style: CropStyle | None = None
    crop_aspect: CropAspect | None = None
    minimum_image_size: float = 0.0
    maximum_image_size: float = 0.0
    target_downsample_size: float = 0.0


def load_backend_config(path: Path) -> list[dict[str, object]]:
    """Returns the entries of a multidatabackend.json, unchecked. Raises ConfigError, with the line of a syntax error."""
    try:
        content = parse_json(read_regular(path).decode("utf-8-sig"))
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(message=message, where=str(path), fix="check data_backend_config")]) from error
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        fix = "fix the syntax error; a common cause is an extra or missing comma just before it"
        if path.suffix.lower() == ".toml":
            fix = f"give a TOML file with [[datasets]] as the configuration: smalti train {path}"
        raise ConfigError([Problem(message=error.msg, where=place, fix=fix)]) from error
    except ValueError as error:
        raise ConfigError([Problem(message=str(error), where=str(path), fix="fix the file")]) from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        message = "must be a list of objects, one per dataset"
        raise ConfigError([Problem(message=message, where=str(path), fix='write [{"id": ...}, {"id": ...}]')])
    return content


def parse_datasets(
    entries: Sequence[Mapping[str, object]],
    *,
    where: str,
    defaults: DataDefaults,
    catalog: Catalog | None = None,
    placeholders: Mapping[str, str | None] | None = None,
    dialect: Dialect = Dialect(),  # noqa: B008 - it has no state
    option: Callable[[str], object] = lambda name: None,
) -> tuple[tuple[DatasetSpec, ...], tuple[Problem, ...]]:
    """Check dataset entries; returns the enabled ones, in order of their ids, and every problem found.

    The first part holds only entries without a problem, so use it only when the second is empty. `where` names the source
    for messages; `catalog` says which storages and metadata backends there are (the built-in ones if not given);
    `placeholders` are values of those in paths, except {id}; `dialect` reads entries in the spelling of another trainer, with
    the value of an `option` of the run.
    """
    parser = _EntryParser(
        where=where,
        defaults=defaults,
        catalog=catalog or Catalog(),
        placeholders=placeholders or {},
        entries=entries,
        dialect=dialect,
        option=option,
    )
    enabled = [(position, entry) for position, entry in enumerate(entries) if not _disabled(entry)]
    for position, entry in enabled:
        parser.read(position, entry)
    parser.check_references()
    others = ("eval", "conditioning", *CACHE_TYPES)  # any but these is "image", or reported already
    if all(entry.get("dataset_type") in others for _, entry in enabled):
        parser.problems.append(
            Problem(message="no dataset with images is enabled", where=where, fix="add a dataset with images, or enable one")
        )
    return tuple(sorted(_filtered(parser.specs), key=lambda spec: spec.id)), tuple(parser.problems)


@dataclass(kw_only=True)
class _EntryParser:
    """Parses entries one by one, and collects their problems."""

    where: str
    defaults: DataDefaults
    catalog: Catalog
    placeholders: Mapping[str, str | None]
    entries: Sequence[Mapping[str, object]]
    dialect: Dialect
    option: Callable[[str], object]
    specs: list[DatasetSpec] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    ids: dict[str, object] = field(default_factory=dict)
    """Ids by the names of their files."""

    def read(self, position: int, entry: Mapping[str, object]) -> None:
        name = entry.get("id")
        place = f"{self.where}: dataset {name!r}" if isinstance(name, str) else f"{self.where}: entry {position + 1}"
        if isinstance(name, str):
            self._check_id(place, name)
        given = {key: value for key, value in entry.items() if not is_comment(key) and value not in (None, "")}
        given, problems = fill_placeholders(given, self.placeholders, place)
        found = self.dialect.translate_dataset(given, self.entries, self._known(given), self.option)
        for one in found:
            self.problems += [replace(problem, where=place) for problem in one.problems]
        readable = [one for one in found if one.rest or not one.problems]
        self.problems += problems if readable else ()  # else they follow from what cannot be read
        for one in readable:
            if (made := one.rest.get("id")) != given.get("id"):
                self._check_id(place, str(made))
            self._parse(place, one.rest, [f"{place}: {key} {text}" for key, text in one.notices])

    def _known(self, entry: Mapping[str, object]) -> dict[str, Collection[str]]:
        """The keys of an entry under "", and the storages under the key `type`."""
        storage = self.catalog.storages.get(str(entry.get("type", "local")))
        columns = (key for keys in self.catalog.column_keys.values() for key in keys.model_fields)
        keys = (*ENTRY_KEYS, *SWITCHES, *columns, *(storage.keys if storage else ()))
        return {"": keys, "type": self.catalog.storages.keys()}

    def _parse(self, place: str, entry: Mapping[str, object], notices: Sequence[str] = ()) -> None:
        """Adds the dataset of an entry whose placeholders are filled, or one for each of its resolutions."""
        sizes = entry.get("resolution")
        if not isinstance(sizes, list) or len(sizes) < 2:
            self._add(place, {**entry, "resolution": sizes[0]} if isinstance(sizes, list) and sizes else entry, notices)
            return
        for number, size in enumerate(dict.fromkeys(map(_short_number, sizes))):
            name = f"{entry.get('id')}@{size}"
            self._check_id(place, name)
            one = {**entry, "id": name, "resolution": size}
            self._add(place, one, notices if number == 0 else (), str(entry.get("id")))

    def _add(self, place: str, entry: Mapping[str, object], notices: Sequence[str], whole: str = "") -> None:
        """Adds one dataset, or its problems."""
        before = len(self.problems)
        values = self._split_keys(place, entry, notices)
        try:
            spec = DatasetSpec.model_validate({**values, "entry": whole})
        except ValidationError as error:
            self.problems += wrong_values(error, values, place)
            return
        if spec.has_images:
            self._check_captions(place, spec)
            self.problems += wrong_sizes(spec, place)
        if len(self.problems) == before:
            self.specs.append(spec)

    def check_references(self) -> None:
        """Checks that need all entries: references from one to another, and the default."""
        for kind in ("image_embeds", "text_embeds"):
            known = {spec.id for spec in self.specs if spec.dataset_type == kind}
            invalid = set(self.ids.values()) - {spec.id for spec in self.specs}  # reported already
            for spec in self.specs:
                target = getattr(spec, kind)
                if target is not None and target not in known | invalid:
                    message = f"{kind}: no {kind} entry has the id {target!r}"
                    self._add_problem(f"{self.where}: dataset {spec.id!r}", message, _nearest_value(target, known))
        defaults = [spec.id for spec in self.specs if spec.dataset_type == "text_embeds" and spec.default]
        if len(defaults) > 1:
            message = f"several text_embeds entries are marked as default: {', '.join(defaults)}"
            self._add_problem(self.where, message, "keep 'default' in only one of them")

    def _check_id(self, place: str, name: str) -> None:
        file_name = file_name_of(name)
        if file_name not in self.ids:
            self.ids[file_name] = name
            return
        other = self.ids[file_name]
        message = "this id is used twice"
        if other != name:
            message = f"the files of this dataset and of {other!r} have the same name, {file_name!r}"
        self._add_problem(place, message, "give every dataset an id of its own")

    def _split_keys(self, place: str, entry: Mapping[str, object], found: Sequence[str]) -> dict[str, object]:
        """Returns all values of an entry: with defaults, keys of plugins apart, and notices, which begin with those `found`."""
        storage, known = str(entry.get("type", "local")), self._known(entry)[""]
        metadata, notices = self._metadata_backend(place, entry), list(found)
        values: dict[str, object] = {key: value for key, value in vars(self.defaults).items() if value is not None}
        if metadata in self.catalog.tables:
            values["caption_strategy"] = metadata
        options: dict[str, object] = {}
        values["columns"], rest = self._columns(place, entry)
        for key, value in rest.items():
            if key in ENTRY_KEYS:
                values[key] = value
            elif key == metadata:
                values["metadata_options"] = value
            elif key in known and key not in SWITCHES:
                options[key] = value
            elif key not in known and storage in self.catalog.storages:  # else it may be a key of the storage
                self._add_unknown_key(place, key, known)
        block = entry.get(metadata)
        columns = {**(block if isinstance(block, Mapping) else {}), **options}.get("caption_column")
        if isinstance(columns, Mapping):
            values.setdefault("caption_weights", tuple(columns.values()))
        if _is_on(entry.get("crop", False)):
            values = {**_CROP_ALONE, **values}
        elif "crop" in entry:
            self._check_stretched(place)
        if _is_on(entry.get("preserve_data_backend_cache", False)):
            why = "an unchanged listing keeps the index anyway, and nothing is deleted"
            notices.append(f"{place}: preserve_data_backend_cache has no effect: {why}")
        if str(values.get("crop_aspect", "")).lower() not in ("closest", "random"):
            unused = [key for key in ("crop_aspect_buckets", "max_upscale_threshold") if entry.get(key)]
            notices += [f"{place}: {key} has no effect: it belongs to crop_aspect closest and random" for key in unused]
        values["metadata_backend"] = metadata
        if metadata in WITH_TEXTS and str(values.get("caption_strategy")).lower() == "textfile":
            values["caption_strategy"] = metadata
        kind = values.setdefault("dataset_type", "image")
        self._check_choice(place, "type", storage, self.catalog.storages)
        if kind in (*TYPES_WITH_IMAGES, "conditioning"):
            if metadata != storage:  # else it follows from the storage
                self._check_choice(place, "metadata_backend", metadata, self.catalog.metadata)
            if storage == "local" and "instance_data_dir" not in values:
                self._add_problem(place, "instance_data_dir is missing", "set it to the folder of the images")
        return {**values, "storage_options": options, "notices": tuple(notices)}

    def _columns(self, place: str, entry: Mapping[str, object]) -> tuple[dict[str, ColumnKeys], dict[str, object]]:
        """Returns the keys for columns, checked, by the name of the column, and the rest of an entry. Adds their problems.

        Values that are the defaults ask for no column.
        """
        found, rest = dict[str, ColumnKeys](), dict(entry)
        for name, keys in self.catalog.column_keys.items():
            given = {key: rest.pop(key) for key in keys.model_fields if key in rest}
            try:
                if given and (made := keys.model_validate(given, context=self.option)).model_dump(exclude_defaults=True):
                    found[name] = made
            except ValidationError as error:
                self.problems += wrong_values(error, given, place)
        return found, rest

    def _metadata_backend(self, place: str, entry: Mapping[str, object]) -> str:
        """Returns the metadata backend, which may follow from the storage."""
        name = str(entry.get("metadata_backend", "discovery")).lower()
        if name == "discovery" and str(entry.get("type", "")).lower() == "huggingface":
            return "huggingface"
        if str(entry.get("type", "")).lower() == "csv":
            if name not in ("discovery", "csv"):
                message = f"metadata_backend {name!r}: the captions of type 'csv' are in its list"
                self._add_problem(place, message, "remove metadata_backend, and set csv_caption_column")
            return "csv"
        return name

    def _check_stretched(self, place: str) -> None:
        """Adds a problem where `crop: false` may have the sense of another trainer, and nothing that knows it is active."""
        if self._other_trainers and any(entry.get("dataset_type") == "text_embeds" for entry in self.entries):
            message = "crop: false stretches images here, but not in files of SimpleTuner, which have a text_embeds entry too"
            self._add_problem(place, message, f"set crop: true and crop_aspect: preserve; {self._other_trainers}")

    def _add_unknown_key(self, place: str, key: str, known: Collection[str]) -> None:
        """Only a spelling mistake has a near name: a name that is merely similar has another meaning."""
        if package := package_of("dataset_keys", key):
            self.problems.append(package.problem(f"{key} belongs to {package.distribution}", place))
            return
        fix = did_you_mean(key.lower(), known, cutoff=0.85)
        fix = fix or "; ".join(filter(None, ("remove it", "`smalti dataset reference` prints all keys", self._other_trainers)))
        self._add_problem(place, f"unknown key {key!r}", fix)

    @property
    def _other_trainers(self) -> str:
        """What reads entries in the spelling of other trainers, and how to get it; "" if it is active."""
        package = package_of("commands", "config import")
        return (
            f"{package.distribution} reads those of other trainers: {package.fix}"
            if package and not self.dialect.trainer
            else ""
        )

    def _check_captions(self, place: str, spec: DatasetSpec) -> None:
        strategy = spec.caption_strategy
        tables = self.catalog.tables
        if strategy == spec.metadata_backend and strategy not in (*tables, *CAPTION_STRATEGIES):
            return  # reported already
        if strategy in tables and strategy != spec.metadata_backend:
            fix = f"set metadata_backend to {strategy!r}, or choose another caption_strategy"
            self._add_problem(place, f"caption_strategy {strategy!r} needs the metadata_backend of the same name", fix)
        self._check_choice(place, "caption_strategy", strategy, [*CAPTION_STRATEGIES, *sorted(tables)])
        if not spec.instance_prompt:
            for key, wanted in (
                ("caption_strategy=instanceprompt", strategy == "instanceprompt"),
                ("prepend_instance_prompt", spec.prepend_instance_prompt),
                ("only_instance_prompt", spec.only_instance_prompt),
                ("instance_prompt_fallback", spec.instance_prompt_fallback),
            ):
                if wanted:
                    self._add_problem(
                        place, f"{key} needs an instance_prompt", "--instance_prompt=TEXT, or set instance_prompt in the entry"
                    )

    def _check_choice(self, place: str, key: str, value: str, known: Collection[str]) -> None:
        if value in known:
            return
        if package := package_of("storages", value):
            self.problems.append(package.problem(f"{key}: {value!r} belongs to {package.distribution}", place))
        elif several := [name for name in known if name.endswith(f":{value}")]:
            self._add_problem(place, f"{key}: {value!r} is registered by several plugins", f"choose {' or '.join(several)}")
        else:
            self._add_problem(place, f"{key}: {value!r} is unknown", _nearest_value(value, known))

    def _add_problem(self, place: str, message: str, fix: str) -> None:
        self.problems.append(Problem(message=message, where=place, fix=fix))


def is_comment(key: str) -> bool:
    """Whether a key of an entry is a comment: "_comment", "//", "#"."""
    return key.startswith(("_", "//", "#"))


def _filtered(specs: Sequence[DatasetSpec]) -> Iterator[DatasetSpec]:
    """Yields the entries, those with images with the caption filters of the text_embeds entry that they use."""
    texts = {spec.id: spec for spec in specs if spec.dataset_type == "text_embeds"}
    common = [spec for spec in texts.values() if spec.default] or list(texts.values())[:1]
    for spec in specs:
        used = texts.get(spec.text_embeds or "", common[0] if common else None)
        if used is not None and used.caption_filter_list and spec.has_images:
            spec = spec.model_copy(update={"caption_filter_list": (*used.caption_filter_list, *spec.caption_filter_list)})
        yield spec


def _disabled(entry: Mapping[str, object]) -> bool:
    """Whether an entry is disabled."""
    return any(_is_on(entry.get(key, False)) for key in SWITCHES)


def _is_on(value: object) -> bool:
    """Whether a boolean value is true. The text "false" is false, as in all options."""
    return str(value).lower() not in ("false", "0", "no", "off", "none", "")


def _short_number(value: object) -> str:
    """512, "512" and 512.0 as the same text; anything else as it is."""
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)


def _nearest_value(name: str, known: Collection[str]) -> str:
    return did_you_mean(name.lower(), known) or (f"known values: {', '.join(known)}" if known else "")
