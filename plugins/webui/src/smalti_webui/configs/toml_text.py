"""The TOML text of a draft: which options it gives, and the same text with some of them changed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import cast

import tomlkit
from tomlkit.exceptions import TOMLKitError

from smalti import UserError
from smalti.config import Schema, flat, parse_value, set_values
from smalti.system import load_toml

NAME = "config.toml"


def content_of(text: str) -> dict[str, object]:
    """What the text says. Raises UserError with the place of a syntax error."""
    return cast(dict[str, object], parse_value(Path(NAME), text))


def given(text: str, schema: Schema) -> dict[str, object]:
    """The values that the text gives, by option, as they are written; rows of tables with their comments."""
    content_of(text)
    document = tomlkit.parse(text)
    found: dict[str, object] = {}
    for key, value in flat(cast(MutableMapping[str, object], document), schema.groups):
        if (option := schema.find(key)) is not None:
            plain = unwrapped(value)
            found.setdefault(option.name, value if _is_rows(plain) and hasattr(value, "as_string") else plain)
    return found


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def other_keys(text: str, schema: Schema) -> list[str]:
    """Keys of the text that are no options."""
    return [key for key, _ in flat(content_of(text), schema.groups) if schema.find(key) is None]


def with_values(text: str, schema: Schema, values: Mapping[str, object]) -> str:
    """The text with these values by option; None removes one. Comments, order and spelling of everything else stay.

    Raises UserError if the text is not TOML, or if it cannot be changed without changing the rest of it.
    """
    before = {name: value for name, value in _plain(text, schema).items() if name not in values}
    wanted = before | {name: unwrapped(value) for name, value in values.items() if value is not None}
    try:
        changed = set_values(text, schema, values)
        changed = changed if changed.endswith("\n") or not changed else changed + "\n"
        fits = _plain(changed, schema) == wanted and other_keys(changed, schema) == other_keys(text, schema)
    except (TOMLKitError, UserError, ValueError):
        fits = False
    if not fits:
        names = ", ".join(values)
        raise UserError(f"{names} cannot be changed without changing the rest of the text", fix="change it in the TOML view")
    return changed.replace("\r\n", "\n").replace("\n", "\r\n") if "\r\n" in text else changed


def _plain(text: str, schema: Schema) -> dict[str, object]:
    content_of(text)
    found: dict[str, object] = {}
    for key, value in flat(load_toml(text), schema.groups):
        if (option := schema.find(key)) is not None:
            found.setdefault(option.name, value)
    return found


def unwrapped(value: object) -> object:
    """A value without the comments and spaces that tomlkit keeps."""
    plain: object = value.unwrap() if hasattr(value, "unwrap") else value
    return plain
