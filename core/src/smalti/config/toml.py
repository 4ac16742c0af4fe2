"""A Config as a TOML file: a new one, or an existing one with some options changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from importlib.metadata import version
from typing import cast

import tomlkit
from tomlkit.items import AoT, Item, Table as TomlTable

from smalti.config.config import PER_MACHINE, Config
from smalti.config.kept_defaults import TABLE
from smalti.config.options import Schema

Table = MutableMapping[str, object]


def as_toml(config: Config, *, complete: bool = False, names: Collection[str] | None = None, defaults: bool = False) -> str:
    """A TOML file that gives this configuration: all options, or the changed ones, or `names`.

    With `defaults`, the defaults of the run follow in their own table: see `smalti.config.kept_defaults`. Tables come last,
    because in TOML all keys after the head of a table belong to it.
    """
    document = tomlkit.document()
    chosen = config.values() if complete or names is not None else config.given() if defaults else config.changes()
    values = {name: value for name, value in chosen.items() if value is not None and (names is None or name in names)}
    tables = {name: value for name, value in values.items() if _are_tables(value)}
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
        document.add(name, _tables_item(rows))
    if defaults:
        document.add(TABLE, _defaults(config, values.keys()))
    return tomlkit.dumps(document)


def _defaults(config: Config, given: Collection[str]) -> TomlTable:
    """The values of options that are not given. None is left out: it cannot be written in TOML."""
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
    """A value as TOML has it. A text with double quotes, such as JSON, becomes a literal string, which needs no escapes.

    A number without decimals is written without a point: an option for fractions reads it as well.
    """
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return tomlkit.string(value, literal=True)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return tomlkit.item(value)


def put_into(text: str, config: Config, names: Collection[str]) -> str:
    """The TOML file `text` with the options `names` as this configuration has them. All else stays, also comments."""
    return set_values(text, config.schema, {name: value for name, value in config.values().items() if name in names})


def set_values(text: str, schema: Schema, values: Mapping[str, object]) -> str:
    """The TOML file `text` with these values by option, also invalid ones; None removes the option. All else stays.

    An option keeps its place and spelling. A new one is added to the table of its section if there is one, else at the top.
    Raises tomlkit's TOMLKitError if the text is not TOML.
    """
    document = tomlkit.parse(text)
    top = cast(Table, document)
    sections = {group.name: document[group.name] for group in schema.groups if group.name in document}
    tables = {name: cast(Table, table) for name, table in sections.items() if isinstance(table, MutableMapping)}
    for name, value in values.items():
        option = schema.options[name]
        places = [(table, key) for table in (top, *tables.values()) for key in table if schema.find(key) is option]
        for table, key in places or [(tables.get(option.group.name, top), name)]:
            if value is not None:
                table[key] = _tables_item(value) if _are_tables(value) else toml_item(value)
            elif places:
                del table[key]
    return tomlkit.dumps(document)


def _tables_item(value: object) -> AoT:
    """Rows that tomlkit has read stay as they are, with their comments."""
    if isinstance(value, AoT):
        return value
    array = tomlkit.aot()
    for row in cast(list[object], value):
        array.append(tomlkit.item(row))
    return array


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
