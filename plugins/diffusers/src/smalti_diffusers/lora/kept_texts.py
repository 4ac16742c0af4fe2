"""What text encoders that have stopped learning make of texts: each text is encoded once, and kept.

A text is encoded alone, so that its rows are those of any batch, rank and resume, to the bit. Parameters of the encoders still
get gradients, which are zeros: strategies wait for those of all that is trained.

Shapes: B captions, L tokens; rows are (B, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti.diffusion import Conditioning

Encode = Callable[[Conditioning], tuple[Tensor, ...]]
LIMIT = 1 << 30
"""Bytes of host memory for the rows of a process: those of about 1700 captions of SDXL. Further texts are encoded each time."""


class KeptTexts:
    """The rows of texts by their token ids. `parameters` are those that encoders train."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._free = LIMIT
        self._rows: dict[bytes, tuple[Tensor, ...]] = {}

    def encoded(self, texts: Conditioning, encode: Encode) -> tuple[Tensor, ...]:
        """What `encode` makes of texts, in training: with gradients of zeros for the parameters."""
        device = next(iter(texts.values())).device
        found = [self._of(key, one, encode) for key, one in _each(texts)]
        rows = (torch.cat([each.to(device) for each in column]) for column in zip(*found, strict=True))
        made: tuple[Tensor, ...] = cast(Any, _Still).apply(tuple(rows), *self._parameters)
        return made

    def _of(self, key: bytes, text: Conditioning, encode: Encode) -> tuple[Tensor, ...]:
        if (rows := self._rows.get(key)) is None:
            with torch.no_grad():
                rows = encode(text)
            size = sum(row.nbytes for row in rows)
            if size <= self._free:
                self._free -= size
                self._rows[key] = tuple(row.cpu() for row in rows)
        return rows


def can_keep_texts(encoders: Sequence[nn.Module]) -> bool:
    """Whether what encoders make of a text depends on it alone, and each rank has them whole: shards are gathered by all."""
    from torch.distributed.tensor import DTensor  # a second, which no launcher that checks a run has to wait

    modules = [module for encoder in encoders for module in encoder.modules()]
    random = any(
        isinstance(rate := getattr(each, name, 0), float) and rate > 0 for each in modules for name in ("p", "dropout")
    )
    return not random and all(
        each.numel() and not isinstance(each, DTensor) for encoder in encoders for each in encoder.parameters()
    )


def _each(texts: Conditioning) -> Iterator[tuple[bytes, Conditioning]]:
    """Texts one by one, with what tells them apart."""
    names = sorted(texts)
    there = [texts[name].cpu().numpy() for name in names]
    for row in range(len(there[0])):
        yield b"".join(each[row].tobytes() for each in there), {name: texts[name][row : row + 1] for name in names}


class _Still(torch.autograd.Function):
    """Rows as they are, which depend on parameters with a gradient of zeros."""

    @staticmethod
    def forward(context: Any, rows: tuple[Tensor, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        context.parameters = parameters
        return tuple(row.view_as(row) for row in rows)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(each) for each in context.parameters)
