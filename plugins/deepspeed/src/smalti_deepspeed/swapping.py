"""Swapping gradients to a drive without damage.

DeepSpeed 0.19 reads a swapped gradient with direct I/O into a page-locked buffer. The kernel supports that only at sector
boundaries, and DeepSpeed does not check whether a read has failed: it steps with the old contents of the buffer. So here only
the part of a gradient that lies on whole pages is swapped. The few elements before and after it stay in memory, as do gradients
that are too small to swap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

PAGE = 4096
"""In bytes: a multiple of every drive's sector size."""


class Swapper(Protocol):
    """The parts of DeepSpeed's class that are used here. `_adjust_for_misaligned_lengths` splits gradients for the drive."""

    _adjust_for_misaligned_lengths: object
    numel_alignment: int
    """Lengths must be multiples of this many elements, so that every thread of a read gets whole blocks."""

    def is_swappable_tensor(self, tensor: Tensor) -> bool:
        """Whether the tensor is large enough to swap."""
        ...


def swap_whole_pages(swapper: Swapper) -> None:
    """Make DeepSpeed split gradients at page boundaries."""

    def split(tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Takes gradients, (n,) each, and their offsets in the flat tensor; returns the pieces and their offsets."""
        pieces: list[Tensor] = []
        places: list[int] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            page = math.lcm(PAGE // tensor.element_size(), swapper.numel_alignment)
            swaps = swapper.is_swappable_tensor(tensor)
            for start, length in split_at_pages(offset, tensor.numel(), page) if swaps else [(0, tensor.numel())]:
                pieces.append(tensor.narrow(0, start, length))
                places.append(offset + start)
        return pieces, places

    swapper._adjust_for_misaligned_lengths = split


def split_at_pages(offset: int, length: int, page: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of the part before whole pages, on whole pages and after them; empty ones are left out.

    A page has `page` elements. The range begins `offset` elements after the start of a page; `start` counts from there.
    """
    head = min(-offset % page, length)
    body = (length - head) // page * page
    for start, size in ((0, head), (head, body), (head + body, length - head - body)):
        if size:
            yield start, size
