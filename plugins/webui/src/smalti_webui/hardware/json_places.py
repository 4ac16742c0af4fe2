"""Where a key stands in a JSON text, so that a problem with it can name its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_MESSAGE = re.compile(r":(\d+):\d+: ")


def line_of(text: str, dotted: str) -> int | None:
    """The line of a dotted key, counted from 1; of its nearest part that is there. None for a text that is not an object."""
    try:
        places = dict(_places(text, _skip(text, 0), ""))
    except (ValueError, IndexError):
        return None
    while dotted and dotted not in places:
        dotted = dotted.rpartition(".")[0]
    return text.count("\n", 0, places[dotted]) + 1 if dotted else None


def line_in(message: str) -> int | None:
    """The line that a message about a syntax error names."""
    match = _IN_MESSAGE.search(message)
    return int(match[1]) if match else None


def _places(text: str, begin: int, prefix: str) -> Iterator[tuple[str, int]]:
    """The offset of every key of the object that begins at `begin`, by its dotted name."""
    if text[begin] != "{":
        raise ValueError("not an object")
    decoder, place = json.JSONDecoder(), _skip(text, begin + 1)
    while text[place] != "}":
        key, after = decoder.raw_decode(text, place)
        name = f"{prefix}{key}"
        yield name, place
        start = _skip(text, _skip(text, after) + 1)  # past the colon
        if text[start] == "{":
            yield from _places(text, start, f"{name}.")
        _, end = decoder.raw_decode(text, start)
        place = _skip(text, end)
        if text[place] == ",":
            place = _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place
