"""Stochastic rounding from fp32 to bf16, without bias: weights move even where a step is smaller than bf16 resolves.

A bf16 number is the upper half of an fp32 number. A random number of 16 bits is added to the lower half, which is cut off then.
The nearer the upper neighbour is, the more often the sum carries into the upper half: the mean of many results is the number.

The random numbers are a function of seed, step, name, and place in the whole tensor, and need no state: ranks that each round a
part of a tensor round as one rank with all of it. Words of 32 bits come from a counter by the finaliser of MurmurHash3 (Austin
Appleby, in the public domain), once with each half of a key of 64 bits. Each word serves two neighbours.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_AT_ONCE = 2**22
"""Numbers that are rounded together, which bounds the memory for random ones."""
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
"""The factors of the finaliser, as signed numbers of 32 bits; products are modulo 2**32."""

Key = tuple[int, int]


def key_of(seed: int, step: int, name: str) -> Key:
    """For the tensor of this name in this step, counted from 0."""
    digest = hashlib.sha256(f"{seed} {step} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:8], "little", signed=True)


def round_into(target: Tensor, values: Tensor, begin: int, key: Key) -> None:
    """Fill `target`, bf16 (n,), with these contiguous numbers, fp32 (n,), rounded.

    `begin` is the place of the first one in the whole tensor. What is not finite stays so.
    """
    for start in range(0, len(values), _AT_ONCE):
        piece = values[start : start + _AT_ONCE]
        bits = piece.view(torch.int32) + random_bits(begin + start, len(piece), key, values.device)
        rounded = bits.bitwise_and_(-(2**16)).view(torch.float32)
        target[start : start + _AT_ONCE] = torch.where(piece.isfinite(), rounded, piece)


def random_bits(begin: int, count: int, key: Key, device: torch.device) -> Tensor:
    """The random numbers of these places, (count,), int32 from 0 to 2**16 - 1."""
    words = torch.arange(begin // 2, (begin + count + 1) // 2, dtype=torch.int32, device=device)
    for half in key:
        _mix(words.bitwise_xor_(half))
    return words.view(torch.int16)[begin % 2 : begin % 2 + count].to(torch.int32).bitwise_and_(0xFFFF)


def _mix(words: Tensor) -> None:
    """The finaliser, in place. The shift of a signed number repeats its sign, which is cut off."""
    for shift, factor in ((16, _FIRST), (13, _SECOND), (16, 1)):
        words.bitwise_xor_(words.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1))
        if factor != 1:
            words.mul_(factor)
