"""The lines of `caption_filter_list`: what is removed from captions, or replaced."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from smalti.system import parse_json, read_regular

_SUBSTITUTION = re.compile(r"s/((?:[^/\\]|\\.)+)/((?:[^/\\]|\\.)*)/([gi]*)", re.DOTALL)


def caption_filter(line: str) -> Callable[[str], str]:
    """Returns the function of a line: "s/PATTERN/TEXT/", or a pattern whose matches are removed.

    Raises ValueError for a pattern that is not a regular expression.
    """
    match = _SUBSTITUTION.fullmatch(line)
    pattern, text = (match[1].replace("\\/", "/"), match[2].replace("\\/", "/")) if match else (line, "")
    try:
        compiled = re.compile(pattern, re.IGNORECASE if match and "i" in match[3] else 0)
        # A replacement is checked where a pattern matches; this one always does, and has the same groups.
        re.sub(f"(?:{pattern})|", text, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"{line!r} is not a regular expression: {error}") from error
    return lambda caption: compiled.sub(text, caption)


def filter_lines(value: object) -> object:
    """Returns the lines of a list, or those of the file that a text names: JSON, or text with a line for each."""
    if not isinstance(value, str):
        return value
    path = Path(value).expanduser()
    try:
        content = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"give a list, or a file that can be read: {error}") from error
    if path.suffix.lower() == ".json":
        return parse_json(content)
    return [line for line in map(str.strip, content.splitlines()) if line]


def checked_filters(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the lines. Raises ValueError for one that is not a filter."""
    for line in lines:
        caption_filter(line)
    return lines
