"""Lists of node names as SLURM writes them, such as "gpu[001-003,007],login"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hostlist(text: str) -> list[str]:
    """The names in a list of SLURM, in its order. Raises ValueError for a text that is none.

    A name may have several brackets: "rack[1-2]node[08-10]" is six names.
    """
    return [name for entry in _entries(text) for name in _names(entry)]


def _entries(text: str) -> Iterator[str]:
    """The entries between commas that are not in brackets."""
    depth, begin = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            yield text[begin:index].strip()
            begin = index + 1
    if depth:
        raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
    yield text[begin:].strip()


def _names(entry: str) -> Iterator[str]:
    if not entry:
        return
    parts = [list(_numbers(numbers)) if not plain else [plain] for numbers, plain in _PART.findall(entry)]
    for parts_of_name in product(*parts):
        yield "".join(parts_of_name)


def _numbers(text: str) -> Iterator[str]:
    """The numbers in brackets: "08-10,12" is "08", "09", "10", "12"."""
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{text!r} is not a list of numbers")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
