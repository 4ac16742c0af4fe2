"""A Config as text: a TOML file for the run directory and for people, new or with what it holds already."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from importlib.metadata import version
from typing import cast

import tomlkit
from tomlkit.items import Item, Table as TomlTable

from smalti.config.config import PER_MACHINE, Config
from smalti.config.kept_defaults import TABLE

Table = MutableMapping[str, object]


def as_toml(config: Config, *, complete: bool = False, names: Collection[str] | None = None, defaults: bool = False) -> str:
    """The configuration as a TOML file that gives it again: what differs from the defaults, or all, or the options `names`.

    With `defaults`, those of the run follow in a table of their own, for versions that have others: see
    `smalti.config.kept_defaults`. Tables come last: what follows one in TOML belongs to it.
    """
    document = tomlkit.document()
    chosen = config.values() if complete or names is not None else config.given() if defaults else config.changes()
    values = {name: value for name, value in chosen.items() if value is not None and (names is None or name in names)}
    tables = {name: cast(list[dict[str, object]], value) for name, value in values.items() if _are_tables(value)}
    for group in config.schema.groups:
        names = [name for name in group.options.model_fields if name in values and name not in tables]
        if not names:
            continue
        document.add(tomlkit.comment(group.title))
        for name in names:
            item = toml_item(values[name])
            if (source := config.source(name)) != "default":
                item.comment(" ".join(source.split()))
            document.add(name, item)
        document.add(tomlkit.nl())
    for name, rows in tables.items():
        array = tomlkit.aot()
        for row in rows:
            array.append(tomlkit.item(row))
        document.add(name, array)
    if defaults:
        document.add(TABLE, _defaults(config, values.keys()))
    return tomlkit.dumps(document)


def _defaults(config: Config, given: Collection[str]) -> TomlTable:
    """What holds where nothing is given. None is not written: TOML has no word for it."""
    table = tomlkit.table()
    table.add(
        tomlkit.comment(f"The defaults of this run, as smalti {version('smalti')} has them. They are kept, so that a later")
    )
    table.add(tomlkit.comment("version with other defaults continues the same run. Values above and flags override them."))
    for name, value in config.defaults().items():
        if value is not None and name not in given and name not in PER_MACHINE:
            table.add(name, toml_item(value))
    return table


def toml_item(value: object) -> Item:
    """A value as TOML has it; JSON text unescaped, so that people can read it."""
    if isinstance(value, str) and '"' in value and not {"'", "\n", "\r"} & set(value):
        return tomlkit.string(value, literal=True)
    return tomlkit.item(value)


def put_into(text: str, config: Config, names: Collection[str]) -> str:
    """The TOML file `text` with the options `names` as this configuration has them; all else in it stays, comments too.

    An option keeps its place and spelling where it has one, else goes to the table of its section if there is that.
    """
    document = tomlkit.parse(text)
    top = cast(Table, document)
    sections = {group.name: document[group.name] for group in config.schema.groups if group.name in document}
    tables = {name: cast(Table, table) for name, table in sections.items() if isinstance(table, MutableMapping)}
    for name, value in config.values().items():
        if name not in names:
            continue
        option = config.schema.options[name]
        places = [(table, key) for table in (top, *tables.values()) for key in table if config.schema.find(key) is option]
        for table, key in places or [(tables.get(option.group.name, top), name)]:
            if value is not None:
                table[key] = toml_item(value)
            elif places:
                del table[key]
    return tomlkit.dumps(document)


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
