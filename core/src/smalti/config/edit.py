"""Setting one option in a configuration file of a user. Everything else stays as it was written.

The file's own text is changed at one place, then read again: it must mean what it meant before, with this one value changed.
What cannot be done like that is refused, with the line to write by hand.
"""

from __future__ import annotations

import copy
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tomlkit
from pydantic import ValidationError
from tomlkit.exceptions import TOMLKitError

from smalti.config.accelerate_yaml import is_accelerate
from smalti.config.files import parse_mapping, read_text
from smalti.config.options import Option, Schema
from smalti.config.toml import toml_item
from smalti.errors import UserError
from smalti.system import atomic_write

Value = str | int | float | bool | list[str] | dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One option in one file, before and after. `key` is spelled as the file spells it; `old` is None if it was not there."""

    path: Path
    key: str
    old: object
    new: Value
    written: bool


def set_option(path: Path, schema: Schema, name: str, value: Value) -> Edit:
    """Give an option a value in a TOML, JSON or YAML file; comments, order and spelling of everything else stay.

    The file is replaced atomically, and not touched when it says so already. A list is written as the file has it, as an array
    or as words with commas between; a table as such in JSON, and as JSON text elsewhere. Raises UserError when the file cannot
    be read, or not be changed in this way.
    """
    option, path = schema.options[name], path.resolve()
    text = read_text(path)
    content = parse_mapping(path, text)
    section, key = _place_of(content, schema, option, path)
    old = cast(Mapping[str, object], content[section] if section else content).get(key)
    new = _like(old, value, path)
    if _same(option, old, new):
        return Edit(path=path, key=key, old=old, new=new, written=False)
    changed = _EDITORS[path.suffix.lower()](text, section, key, new)
    wanted = copy.deepcopy(content)
    cast(dict[str, object], wanted[section] if section else wanted)[key] = new
    if changed is None or _meaning(path, changed) != wanted:
        line = _line(path, section, key, new)
        raise UserError(f"{path} cannot be edited without changing the rest of it", fix=f"add this to it: {line}")
    mark = "\ufeff" if path.read_bytes().startswith(b"\xef\xbb\xbf") else ""
    try:
        atomic_write(path, f"{mark}{changed}".encode(), mode=stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}", fix="check the file's permissions and the free disk space") from error
    return Edit(path=path, key=key, old=old, new=new, written=True)


def _place_of(content: Mapping[str, object], schema: Schema, option: Option, path: Path) -> tuple[str, str]:
    """The section ("" for the top) and the key under which this file has the option, or would have it."""
    if is_accelerate(content):
        section, _, key = option.accelerate.partition("=")[0].rpartition(".")
        if not option.accelerate or "=" in option.accelerate or (section and not isinstance(content.get(section), dict)):
            raise UserError(
                f"{path} is an Accelerate configuration, with no place for {option.name}", fix="choose another file"
            )
        return section, key
    named = option.group.name
    inner = content.get(named)
    for section, mapping in (("", content), (named, inner if isinstance(inner, dict) else {})):
        for key in mapping:
            if (found := schema.find(key)) is not None and found.name == option.name:
                return section, key
    if isinstance(inner, dict):
        return named, option.name
    return "", f"--{option.name}" if any(key.startswith("--") and schema.find(key) for key in content) else option.name


def _like(old: object, value: Value, path: Path) -> Value:
    """A list in the form in which the file has it, a table in one that it can have."""
    if isinstance(value, dict):
        return value if path.suffix.lower() == ".json" else json.dumps(value)
    if not isinstance(value, list):
        return value
    if isinstance(old, list) or (old is None and path.suffix.lower() == ".toml"):
        return value
    return ",".join(value)


def _same(option: Option, old: object, new: Value) -> bool:
    """Whether the file has this value already; a value that is not valid never equals it."""
    try:
        return old is not None and bool(option.check(old) == option.check(new))
    except ValidationError:
        return False


def _meaning(path: Path, text: str) -> dict[str, object] | None:
    try:
        return parse_mapping(path, text)
    except UserError:
        return None


def _line(path: Path, section: str, key: str, value: Value) -> str:
    ending = path.suffix.lower()
    if ending == ".toml":
        line = f"{key} = {json.dumps(value)}"
        return f"{line}, under [{section}]" if section else line
    line = f"{json.dumps(key) if ending == '.json' else key}: {json.dumps(value)}"
    return f"{line}, under {section}" if section else line


# --- TOML -----------------------------------------------------------------------------------------------------------


def _edit_toml(text: str, section: str, key: str, value: Value) -> str | None:
    try:
        document = tomlkit.parse(text)
        place = cast("dict[str, object]", document[section]) if section else document
        place[key] = toml_item(value)
        changed = tomlkit.dumps(document)
        return changed.replace("\r\n", "\n").replace("\n", "\r\n") if "\r\n" in text else changed
    except TOMLKitError:
        return None


# --- JSON -----------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")


def _edit_json(text: str, section: str, key: str, value: Value) -> str | None:
    written = json.dumps(value, ensure_ascii=False)
    begin = _skip(text, 0)
    if section:
        begin, _ = _values(text, begin)[section]
    values = _values(text, begin)
    if key in values:
        start, end = values[key]
        return f"{text[:start]}{written}{text[end:]}"
    pair = f"{json.dumps(key)}: {written}"
    if not values:
        return f"{text[: begin + 1]}{pair}{text[begin + 1 :]}"
    indent = text[begin + 1 : _skip(text, begin + 1)]
    _, end = list(values.values())[-1]
    return f"{text[:end]},{indent or ' '}{pair}{text[end:]}"


def _values(text: str, begin: int) -> dict[str, tuple[int, int]]:
    """Where the values of the object that begins at `begin` stand in the text, which is valid JSON."""
    decoder, found, place = json.JSONDecoder(), {}, _skip(text, begin + 1)
    while text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        start = _skip(text, _skip(text, place) + 1)  # past the colon
        _, end = decoder.raw_decode(text, start)
        found[str(key)] = (start, end)
        place = _skip(text, end)
        if text[place] == ",":
            place = _skip(text, place + 1)
    return found


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


# --- YAML -----------------------------------------------------------------------------------------------------------


def _edit_yaml(text: str, section: str, key: str, value: Value) -> str | None:
    """Edit line by line, which works for plain files. The caller reads the result again to check it."""
    line = f"{key}: {json.dumps(value, ensure_ascii=False)}"
    there = re.compile(
        rf"^(?P<indent>[ ]*)(['\"]?){re.escape(key)}\2[ ]*:(?P<value>[^#\r\n]*?)(?P<rest>[ ]*(#[^\r\n]*)?)$", re.M
    )
    if len(found := list(there.finditer(text))) == 1:
        match = found[0]
        return f"{text[: match.start()]}{match['indent']}{line}{match['rest']}{text[match.end() :]}"
    if found or section:
        return None
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = newline if text and not text.endswith("\n") else ""
    return f"{text}{gap}{line}{newline}"


_EDITORS = {".toml": _edit_toml, ".json": _edit_json, ".yaml": _edit_yaml, ".yml": _edit_yaml}
