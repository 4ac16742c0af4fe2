"""The datasets of all configurations below the roots: those of runs and of files, and folders that the user has added."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from smalti import ConfigError, Problem, UserError
from smalti.config import resolve
from smalti.data import DatasetSpec, catalog_of, dataset_specs
from smalti.plugins import load_plugins, schema_of, selection_of
from smalti.system import atomic_write, load_json, read_regular
from smalti_webui.configs.finding import find_files
from smalti_webui.configs.schemas import own_environment
from smalti_webui.runs.index import RunIndex
from smalti_webui.server.files import make_private

_MOST_RUNS = 60
_FILES_SECONDS = 10.0
_ADDRESSES = ("aws_bucket_name", "aws_data_prefix", "dataset_name", "csv_file")
_NOT_OF_CONFIG = "output_dir: "
"""How a notice begins that is about an argument of the page, not about the configuration."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A configuration file, or a folder of images. `run` is the id of the run that the file belongs to, or ""."""

    id: str
    title: str
    file: Path
    run: str = ""
    is_folder: bool = False

    @property
    def arguments(self) -> list[str]:
        """Those of `smalti dataset`."""
        return [f"--instance_data_dir={self.file}"] if self.is_folder else [str(self.file)]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A dataset with the configurations that use it, the latest first. `location` is a folder or an address."""

    id: str
    spec: DatasetSpec
    location: str
    sources: tuple[Source, ...]

    @property
    def source(self) -> Source:
        return self.sources[0]


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A configuration whose datasets cannot be read."""

    source: Source
    message: str
    fix: str


@dataclass(kw_only=True)
class Known:
    """What commands have found out about a dataset: the results of `scan`, `buckets` and `check`, and when (unix seconds)."""

    results: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def scan(self) -> Mapping[str, Any] | None:
        return self.results.get("scan")

    @property
    def missing_captions(self) -> list[str]:
        return [each["key"] for each in self._unusable() if each["reason"].startswith("no caption")]

    @property
    def unreadable(self) -> list[str]:
        return [each["key"] for each in self._unusable() if not each["reason"].startswith("no caption")]

    def _unusable(self) -> list[dict[str, str]]:
        return list((self.scan or {}).get("quarantined", ()))


class Catalog:
    """Finds datasets. Configurations are read again when their file has changed. Thread-safe."""

    def __init__(self, folder: Path, index: RunIndex, roots: Sequence[Path]) -> None:
        self.folder = folder
        self._index = index
        self._roots = roots
        self._files: tuple[float, list[Path]] = (-_FILES_SECONDS, [])
        self._read: dict[Path, tuple[int, tuple[DatasetSpec, ...] | UserError]] = {}
        self._lock = threading.Lock()

    def all(self) -> tuple[list[Found], list[Unread]]:
        """All datasets with images, and the configurations that could not be read."""
        found: dict[str, Found] = {}
        unread: list[Unread] = []
        for source in self.sources():
            specs = self._specs(source)
            if isinstance(specs, UserError):
                first = specs.problems[0] if isinstance(specs, ConfigError) else Problem.of(specs)
                unread.append(Unread(source=source, message=first.message, fix=first.fix))
                continue
            for spec in specs:
                if spec.dataset_type not in ("image", "eval"):
                    continue
                each = Found(id=id_of(spec), spec=spec, location=location_of(spec), sources=(source,))
                known = found.get(each.id)
                found[each.id] = each if known is None else Found(**{**vars(known), "sources": (*known.sources, source)})
        return list(found.values()), unread

    def find(self, dataset_id: str) -> Found | None:
        return next((each for each in self.all()[0] if each.id == dataset_id), None)

    def sources(self) -> list[Source]:
        """The configurations of runs, the latest first, then configuration files, then the added folders."""
        found = []
        for run in self._index.runs()[:_MOST_RUNS]:
            if run.directory.config_file.is_file():
                found.append(_source(run.directory.config_file, f"run {run.name}", run.id))
        files = [_source(path, path.name) for path in self._configurations()]
        return [*found, *files, *(_source(folder, folder.name) for folder in self.added())]

    def _configurations(self) -> list[Path]:
        """The configuration files below the roots, which are looked for at most every few seconds."""
        if time.monotonic() - self._files[0] > _FILES_SECONDS:
            self._files = time.monotonic(), [each.path for each in find_files(self._roots)]
        return self._files[1]

    def added(self) -> list[Path]:
        """The folders that the user has added."""
        try:
            return [Path(each) for each in load_json(read_regular(self.folder / "folders.json"))["folders"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def add(self, folder: Path) -> str:
        """Add a folder. Returns the id of its dataset. Raises UserError if it cannot be one."""
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder", fix="give the folder of the images")
        specs = self._specs(_source(folder, folder.name))
        if isinstance(specs, UserError):
            raise specs
        self._write_added([each for each in self.added() if each != folder] + [folder])
        return id_of(specs[0])

    def remove(self, folder: Path) -> None:
        """Show a folder no longer. Its files are not touched."""
        self._write_added([each for each in self.added() if each != folder])

    def _write_added(self, folders: Iterable[Path]) -> None:
        self._write("folders.json", {"folders": [str(each) for each in folders]})

    # --- what commands found ----------------------------------------------------------------------------------------

    def arguments(self, source: Source) -> list[str]:
        """The arguments of `smalti dataset` for a configuration. Indexes are kept by the page, so no run is changed."""
        options = source.arguments
        if not source.is_folder and b"{output_dir}" in read_regular(source.file):
            return options
        return [*options, f"--output_dir={self.folder / 'indexes' / source.id}"]

    def known(self, dataset: Found) -> Known:
        try:
            return Known(**load_json(read_regular(self.folder / f"{dataset.id}.json")))
        except (OSError, ValueError, TypeError):
            return Known()

    def keep(self, dataset: Found, command: str, result: Mapping[str, Any]) -> None:
        """Keep what a command has found. Of a scan of several datasets, the part of this one."""
        if command == "scan":
            mine = [each for each in result["datasets"] if each["id"] == dataset.spec.id]
            if not mine:
                return
            result = mine[0]
        else:
            notices = [each for each in result.get("notices", ()) if not each.startswith(_NOT_OF_CONFIG)]
            result = {**result, "notices": notices}
        known = self.known(dataset)
        known.results[command], known.times[command] = result, time.time()
        self._write(f"{dataset.id}.json", vars(known))

    def _write(self, name: str, content: object) -> None:
        make_private(self.folder)
        atomic_write(self.folder / name, json.dumps(content).encode(), mode=0o600)

    def _specs(self, source: Source) -> tuple[DatasetSpec, ...] | UserError:
        try:
            changed = source.file.stat().st_mtime_ns
        except OSError as error:
            return UserError(f"{source.file} cannot be read: {error.strerror or error}")
        with self._lock:
            known = self._read.get(source.file)
            if known is None or known[0] != changed:
                known = changed, _specs_of(source)
                self._read[source.file] = known
            return known[1]


def id_of(spec: DatasetSpec) -> str:
    """The same for configurations that use the same images with the same captions."""
    text = "|".join((spec.type, location_of(spec), spec.id, spec.caption_strategy, spec.caption_extension, spec.dataset_type))
    return blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()


def location_of(spec: DatasetSpec) -> str:
    """The folder or address of a dataset, for people. Other options of a storage may be secret."""
    if spec.instance_data_dir is not None:
        return str(spec.instance_data_dir)
    found = [str(spec.storage_options[name]) for name in _ADDRESSES if spec.storage_options.get(name)]
    return " ".join(found) or spec.type


def _source(file: Path, title: str, run: str = "") -> Source:
    digest = blake2b(str(file).encode(errors="surrogateescape"), digest_size=6).hexdigest()
    return Source(id=digest, title=title, file=file, run=run, is_folder=file.is_dir())


def _specs_of(source: Source) -> tuple[DatasetSpec, ...] | UserError:
    """The datasets of a configuration, or why it cannot be read."""
    try:
        file, flags = (None, source.arguments) if source.is_folder else (source.file, [])
        plugins = load_plugins(selection_of(flags, file, os.environ))
        config = resolve(schema_of(plugins), flags, file=file, environment=own_environment())
        return dataset_specs(config, catalog_of(plugins))
    except UserError as error:
        return error
