"""Placeholders in the paths of a dataset entry: {id}, {model_family} and {output_dir}."""

from __future__ import annotations

import re
from collections.abc import Mapping

from smalti.data.datasets.spec import file_name_of
from smalti.errors import Problem

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
