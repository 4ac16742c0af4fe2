"""A Config as text: a TOML file for the run directory and for people."""

from __future__ import annotations

from typing import cast

import tomlkit

from smalti.config import Config


def as_toml(config: Config, *, complete: bool = False) -> str:
    """The configuration as a TOML file that gives it again; only what differs from the defaults unless `complete`.

    Tables come last: what follows one in TOML belongs to it.
    """
    document = tomlkit.document()
    values = {name: value for name, value in (config.values() if complete else config.changes()).items() if value is not None}
    tables = {name: cast(list[dict[str, object]], value) for name, value in values.items() if _are_tables(value)}
    for group in config.schema.groups:
        names = [name for name in group.options.model_fields if name in values and name not in tables]
        if not names:
            continue
        document.add(tomlkit.comment(group.title))
        for name in names:
            item = tomlkit.item(values[name])
            if (source := config.source(name)) != "default":
                item.comment(" ".join(source.split()))
            document.add(name, item)
        document.add(tomlkit.nl())
    for name, rows in tables.items():
        array = tomlkit.aot()
        for row in rows:
            array.append(tomlkit.item(row))
        document.add(name, array)
    return tomlkit.dumps(document)


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
