"""A model in one file, in the layout that its tools load: which tensors it has, and what each is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smalti.checkpoint import StoredTensor
from smalti_diffusers.sources.layouts import Table

_MARKED = re.compile(r"(.*?)(?:#(\d)|([~^@]))?")


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of the file: `parts` joined along their first dimension, then changed as `mark` says (see `layouts`)."""

    name: str
    parts: tuple[str, ...]
    mark: str = ""

    def stored(self, parts: Mapping[str, StoredTensor]) -> StoredTensor:
        """Its type and shape, from those of its parts."""
        first = parts[self.parts[0]]
        shape = (sum(parts[name].shape[0] for name in self.parts), *first.shape[1:]) if first.shape else ()
        if self.mark == "@":
            shape = shape[::-1]
        return replace(first, shape=(*shape, 1, 1) if self.mark == "^" and len(shape) == 2 else shape)

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor itself. `read` returns one of the parts."""
        tensors = [read(name) for name in self.parts]
        joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if self.mark == "~":
            return torch.cat(joined.chunk(2)[::-1])
        if self.mark == "@":
            return joined.T.contiguous()
        return joined[:, :, None, None] if self.mark == "^" and joined.ndim == 2 else joined


def file_tensors(names: Iterable[str], table: Table) -> list[FileTensor]:
    """What a file has in place of these tensors."""
    rules = [
        (re.compile(re.escape(ours).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)"), theirs) for ours, theirs in _longest_first(table)
    ]
    joined: dict[str, dict[int, str]] = {}
    marks: dict[str, str] = {}
    for name in names:
        place, number, mark = _renamed(name, rules)
        joined.setdefault(place, {})[number] = name
        marks[place] = mark
    return [
        FileTensor(name=place, parts=tuple(parts[number] for number in sorted(parts)), mark=marks[place])
        for place, parts in joined.items()
    ]


def _longest_first(table: Table) -> Iterator[tuple[str, str]]:
    """Numbers before placeholders: what is said of one block goes before what is said of all."""
    yield from sorted(table.items(), key=lambda rule: (rule[0].count("."), "{}" not in rule[0]), reverse=True)


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> tuple[str, int, str]:
    """The name in the file, which of its parts this tensor is, and the mark."""
    for pattern, theirs in rules:
        if found := pattern.match(name):
            marked = _MARKED.fullmatch(theirs)
            assert marked is not None
            place = marked[1].format(*found.groups()) if "{}" in marked[1] else marked[1]
            return place + name[found.end() :], int(marked[2] or 0), marked[3] or ""
    return name, 0, ""
