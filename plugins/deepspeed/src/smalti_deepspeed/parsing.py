"""A DeepSpeed configuration as it is given: a table, JSON text, or the path of a JSON file. Imports no torch, no DeepSpeed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from smalti import UserError
from smalti.system import parse_json
from smalti_deepspeed.keys import ACCELERATES

Document = dict[str, object]


def read(value: object) -> Document:
    """The configuration that `value` is, or names. Raises UserError with line and column of a syntax error."""
    if isinstance(value, Mapping):
        return _followed(without_comments(value))
    text = str(value).strip()
    if text.startswith(("{", "[")):
        return _followed(parse(text, "deepspeed_config"))
    return read_file(place(text))


def without_comments(table: Mapping[str, object]) -> Document:
    """A table without the keys that people use as comments in JSON, such as `_comment` or `//`, at any depth."""
    return {
        str(key): without_comments(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if not str(key).startswith(("_", "//", "#")) and str(key).lower() not in ("comment", "comments", "description")
    }


def _followed(document: Document) -> Document:
    """A table that only names a file, as Accelerate's may, stands for what the file holds."""
    file = document.get("deepspeed_config_file")
    if file is None:
        return document
    if beside := document.keys() - ACCELERATES.keys() - {"deepspeed_config_file"}:
        message = f"deepspeed_config names the file {file}, and says more beside it: {', '.join(sorted(beside))}"
        raise UserError(message, fix="write that into the file, or leave deepspeed_config_file out")
    return read_file(place(str(file)))


def place(text: str) -> Path:
    """The path that a text names. A "~" that stands for nobody stays, so that the complaint is that there is no such file."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises where there is nobody of that name


def read_file(path: Path) -> Document:
    """Raises UserError when there is no such file, or no DeepSpeed configuration in it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        fix = "give JSON text, or the path of a JSON file; `smalti deepspeed build` writes one"
        raise UserError(f"there is no file {path}", fix=fix) from None
    except (OSError, ValueError) as error:  # bytes that are no UTF-8, a name that can be none
        raise UserError(f"cannot read {path}: {error}", fix="check that it is a readable text file in UTF-8") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The object that a JSON text is; `name` says in complaints where it stands."""
    try:
        value = parse_json(text.removeprefix("\ufeff").encode())
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be shown, nor handed on
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        raise UserError(f"{place}: this is not JSON: {error.msg}", fix=_hint(text, error.pos)) from None
    except ValueError as error:
        raise UserError(f"{name}: {error}", fix="fix that entry") from None
    if not isinstance(value, dict):
        fix = 'write {"zero_optimization": {"stage": 2}}'
        raise UserError(f"{name} contains a {type(value).__name__}, not a table of settings", fix=fix)
    return without_comments(value)


def as_text(document: Mapping[str, object]) -> str:
    """One line of JSON, the form in which a configuration travels."""
    return json.dumps(document, allow_nan=False)


def section(document: Mapping[str, object], *names: str) -> dict[str, object]:
    """A table inside of tables; empty if there is none."""
    found: object = document
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def is_none(value: object) -> bool:
    """Whether an option that may be None is given none, in whatever spelling."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def is_open(value: object) -> bool:
    """Whether a value is left for smalti to fill in."""
    return value is None or value == "auto"


def _hint(text: str, position: int) -> str:
    if text[position : position + 1] == "'":
        return "JSON has double quotes: \"stage\", not 'stage'"
    if text[position : position + 4] in ("True", "None", "Fals"):
        return "JSON spells them true, false and null"
    if text[position : position + 2] in ("//", "/*") or text[position : position + 1] == "#":
        return "JSON has no comments"
    return "fix the syntax error"
