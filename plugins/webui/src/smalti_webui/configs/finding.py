"""The configuration files below the folders of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from smalti.config import flat
from smalti.plugins import Selection
from smalti.rundir import RunDirectory
from smalti.system import load_toml, read_regular
from smalti_webui.configs.schemas import schema_with
from smalti_webui.configs.starting import LARGEST

_DEPTH = 4
_FOLDERS = 2_000
_ENTRIES = 2_000
"""Entries of a folder that are read: one with more has images."""
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages"})
_MARKS = frozenset({"model_family", "output_dir", "instance_data_dir", "datasets", "pretrained_model_name_or_path"})
"""A file with one of these options is a configuration."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration file of the user. `family` is what it trains, "" if it does not say so."""

    path: Path
    family: str
    changed: float


def find_files(roots: Sequence[Path]) -> list[Found]:
    """Configuration files below the roots, the last changed first. Those that runs have written are left out."""
    found: dict[Path, Found] = {}
    for root in roots:
        for path in _toml_files(root):
            try:
                status = path.stat()
                family = _family_in(path, status.st_mtime_ns) if status.st_size <= LARGEST else None
            except OSError:
                continue
            if family is not None:
                found[path] = Found(path=path, family=family, changed=status.st_mtime)
    return sorted(found.values(), key=lambda each: -each.changed)


@lru_cache(maxsize=4096)
def _family_in(path: Path, changed: int) -> str | None:
    """The model family that a configuration names; None if the file is no configuration."""
    try:
        content: Mapping[str, object] = load_toml(read_regular(path).decode("utf-8-sig"))
    except (OSError, ValueError):
        return None
    schema = schema_with(Selection())
    options = {option.name: value for key, value in flat(content, schema.groups) if (option := schema.find(key)) is not None}
    return str(options.get("model_family", "")) if options.keys() & _MARKS else None


def _toml_files(root: Path) -> Iterator[Path]:
    """TOML files at most some folders deep, not in hidden folders, not through links, not in run directories."""
    waiting, left = [(root, 0)], _FOLDERS
    while waiting and left:
        folder, depth = waiting.pop()
        left -= 1
        run = RunDirectory(folder)
        is_run = run.record_file.exists()
        written = run.config_file if is_run else None
        try:
            with os.scandir(folder) as entries:
                for _, entry in zip(range(_ENTRIES), entries, strict=False):
                    path = folder / entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if depth < _DEPTH and not is_run and not entry.name.startswith(".") and entry.name not in _SKIPPED:
                            waiting.append((path, depth + 1))
                    elif entry.name.endswith(".toml") and entry.is_file(follow_symlinks=False) and path != written:
                        yield path
        except OSError:
            continue
