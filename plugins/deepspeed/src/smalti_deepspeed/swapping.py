"""Swapping gradients to a drive so that they come back as they went.

DeepSpeed 0.19 reads a swapped gradient straight into its place in a page-locked buffer, past the page cache. The kernel does
that only for places at whole sectors, and DeepSpeed does not look whether a read has failed: it steps with what was in the
buffer before. So here only the part of a gradient that lies on whole pages goes to the drive; the few elements before and after
it stay in memory, with the gradients that are too small to swap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

PAGE = 4096
"""Bytes: a multiple of the sector of every drive."""


class Swapper(Protocol):
    """What is used of DeepSpeed's. It asks `_adjust_for_misaligned_lengths` how to cut gradients for the drive."""

    _adjust_for_misaligned_lengths: object
    numel_alignment: int
    """Elements of which a length has to be a multiple, so that every thread of a read gets whole blocks."""

    def is_swappable_tensor(self, tensor: Tensor) -> bool:
        """Whether it is large enough."""
        ...


def swap_whole_pages(swapper: Swapper) -> None:
    """Have DeepSpeed cut gradients at pages from now on."""

    def cut(tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Gradients, (n,) each, and the elements at which they begin in their flat tensor; the same of the pieces."""
        pieces: list[Tensor] = []
        places: list[int] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            page = math.lcm(PAGE // tensor.element_size(), swapper.numel_alignment)
            swaps = swapper.is_swappable_tensor(tensor)
            for start, length in cut_at_pages(offset, tensor.numel(), page) if swaps else [(0, tensor.numel())]:
                pieces.append(tensor.narrow(0, start, length))
                places.append(offset + start)
        return pieces, places

    swapper._adjust_for_misaligned_lengths = cut


def cut_at_pages(offset: int, length: int, page: int) -> Iterator[tuple[int, int]]:
    """What lies on whole pages of so many elements, and what lies before and after it, each as (start, length).

    The range begins `offset` elements after the start of a page; starts are counted from there.
    """
    head = min(-offset % page, length)
    body = (length - head) // page * page
    for start, size in ((0, head), (head, body), (head + body, length - head - body)):
        if size:
            yield start, size
