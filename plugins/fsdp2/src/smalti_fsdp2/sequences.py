"""Sequences in parts: which tokens a rank has, and how the parts are joined. No communication.

n tokens are split over C ranks into parts of ceil(n / C), in order. The last parts are padded with the last token,
so that all parts have the same length and no unusual values. The padding is removed wherever the parts are joined.

Shapes: C ranks of a group; `dim` is that of the tokens, not counting a leading C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def part_length(length: int, count: int) -> int:
    return -(-length // count)


def part(whole: Tensor, dim: int, place: int, count: int) -> Tensor:
    """The tokens that the rank at `place` in a group of `count` keeps."""
    length = whole.shape[dim]
    size = part_length(length, count)
    first = min(place * size, length)
    kept = whole.narrow(dim, first, min(size, length - first))
    missing = size - kept.shape[dim]
    if not missing:
        return kept
    shape = list(whole.shape)
    shape[dim] = missing
    return torch.cat([kept, whole.narrow(dim, length - 1, 1).expand(shape)], dim)


def whole(parts: Tensor, dim: int, length: int) -> Tensor:
    """(C, ...) parts in the order of ranks -> the sequence of `length` tokens, in memory of its own."""
    return torch.cat(_without_filling(parts, dim, length), dim)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Several sequences one after the other, each split by itself: what attention over text and image sees.

    `lengths` are those of the whole sequences; a rank has its part of the first, then its part of the second, and so on.
    """

    lengths: tuple[int, ...]
    count: int

    @property
    def part_length(self) -> int:
        return sum(part_length(length, self.count) for length in self.lengths)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def part(self, whole: Tensor, dim: int, place: int) -> Tensor:
        return torch.cat([part(each, dim, place, self.count) for each in torch.split(whole, list(self.lengths), dim)], dim)

    def parts(self, whole: Tensor, dim: int) -> Tensor:
        """The parts of all ranks: (C, ...)."""
        return torch.stack([self.part(whole, dim, place) for place in range(self.count)])

    def whole(self, parts: Tensor, dim: int) -> Tensor:
        """(C, ...) parts -> the sequences, each of them whole, in their order."""
        sizes = [part_length(length, self.count) for length in self.lengths]
        pieces = torch.split(parts, sizes, dim + 1 if dim >= 0 else dim)
        kept = [_without_filling(piece, dim, length) for piece, length in zip(pieces, self.lengths, strict=True)]
        return torch.cat([each for sequence in kept for each in sequence], dim)


def _without_filling(parts: Tensor, dim: int, length: int) -> list[Tensor]:
    """What each of the (C, ...) parts holds of a sequence of `length` tokens."""
    size = part_length(length, parts.shape[0])
    ends = [min(max(length - place * size, 0), size) for place in range(parts.shape[0])]
    return [each.narrow(dim, 0, end) for each, end in zip(parts.unbind(), ends, strict=True)]
