"""Which control an option has in a form, and what the text in it means as a value of a TOML file.

The text is what a flag would have: a field and a flag with the same text are the same value.
"""

from __future__ import annotations

import json
import math
import re
from typing import Literal, get_args, get_origin

import tomlkit
from pydantic import BeforeValidator

from smalti import UserError
from smalti.config import Option
from smalti.system import load_json, load_toml

Kind = Literal["switch", "choice", "number", "text", "path", "names", "texts", "tables", "secret"]
"""A switch is on or off. A choice may also be left to the default. Names are separated by commas, texts stand on lines."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_REFERENCE = re.compile(r"\{env:[A-Za-z_][A-Za-z0-9_]*\}")


def kind_of(option: Option) -> Kind:
    """The control of an option. Every option has one."""
    if option.secret is True:
        return "secret"
    if option.choices or (option.is_flag and option.may_be_none):
        return "choice"
    if option.is_flag:
        return "switch"
    if option.is_list:
        return _kind_of_list(option)
    words = option.kind.split(" or ")
    if words[0] in ("integer", "number"):
        return "number"
    return "path" if "path" in words else "text"


def _kind_of_list(option: Option) -> Kind:
    annotation = option.info.annotation
    inner = [get_args(each)[0] for each in (annotation, *get_args(annotation)) if get_origin(each) is tuple]
    if inner[0] is not str:
        return "tables"
    split = [each.func("a,b") for each in option.info.metadata if isinstance(each, BeforeValidator)]  # type: ignore[call-arg]
    return "names" if split and len(split[0]) > 1 else "texts"


def choices_of(option: Option) -> tuple[str, ...]:
    """The values of a choice, without the one that leaves it to the default."""
    return option.choices or ("true", "false")


def is_hidden(option: Option, value: object) -> bool:
    """Whether a value, as it stands in a file, is a secret, which no page shows."""
    if option.secret is True:
        return not (isinstance(value, str) and _REFERENCE.fullmatch(value.strip()))
    return option.is_secret(value)


def as_text(option: Option, value: object) -> str:
    """The text of a control for a value as it stands in a file, which may be invalid; "" for None and for secrets."""
    if value is None or is_hidden(option, value):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _one_text(option, value)
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value) and option.is_list:
        return _texts(kind_of(option), list(value))
    if kind_of(option) == "tables" and isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return _tables(option.name, value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _one_text(option: Option, value: str) -> str:
    if kind_of(option) == "texts" and ("\n" in value or not value.strip()):
        return json.dumps([value], ensure_ascii=False)
    return value


def _texts(kind: Kind, texts: list[str]) -> str:
    """Names with commas or texts on lines, if they can be read again from that; else JSON."""
    if kind == "names":
        plain = all(each and each == each.strip() and "," not in each for each in texts)
        joined = ", ".join(texts)
    else:
        plain = all(each.strip() and "\n" not in each for each in texts)
        joined = "\n".join(texts)
    return joined if plain and not joined.lstrip().startswith("[") else json.dumps(texts, ensure_ascii=False)


def _tables(name: str, rows: list[dict[str, object]]) -> str:
    document = tomlkit.document()
    if hasattr(rows, "as_string"):  # read by tomlkit: with its comments
        document.add(name, rows)
    else:
        array = tomlkit.aot()
        for row in rows:
            array.append(tomlkit.item(row))
        document.add(name, array)
    return tomlkit.dumps(document).strip("\n")


def from_text(option: Option, text: str) -> object | None:
    """The value of a TOML file for the text of a control. None: not given. Invalid values are kept, as text.

    Raises UserError if tables are not TOML.
    """
    kind = kind_of(option)
    if kind in ("names", "texts"):
        return _list_of(option, kind, text)
    if kind == "tables":
        return _rows(option, text)
    if text == "":
        return "" if option.may_be_empty else None
    if kind in ("switch", "choice") and option.is_flag and text in ("true", "false"):
        return text == "true"
    return _number(option, text.strip()) if kind == "number" else text


def _number(option: Option, text: str) -> int | float | str | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return text or None
    return value if "number" in option.kind and math.isfinite(value) else text


def _list_of(option: Option, kind: Kind, text: str) -> list[str] | None:
    if not text.strip():
        return [] if option.default else None
    if text.lstrip().startswith("["):
        try:
            found = load_json(text)
        except ValueError:
            found = None
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
    if kind == "texts":
        return [line for line in text.split("\n") if line.strip()]
    return [word.strip() for word in text.split(",") if word.strip()]


def _rows(option: Option, text: str) -> object | None:
    """The rows of a text such as [[datasets]], with their comments."""
    if not text.strip():
        return [] if option.default else None
    fix = f"begin each table with [[{option.name}]]"
    try:
        content = load_toml(text)
    except ValueError as error:
        raise UserError(f"{option.name} is not valid TOML: {error}", fix="fix the syntax error") from None
    if others := [key for key in content if key != option.name]:
        raise UserError(f"{others[0]} is outside of [[{option.name}]]", fix=fix)
    rows = content.get(option.name)
    if rows is None:
        return None  # only comments
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise UserError(f"{option.name} is not a list of tables", fix=fix)
    found: object = tomlkit.parse(text)[option.name]
    return found
