"""The kinds of adapters: how their tensors are named beside a layer, and what they make of its weight W.

- lora: W + s B A.
- dora: rows of W + s B A, brought to the lengths in `lora_magnitude_vector`.
- lokr: W + s kron(w1, w2), either of which may be a product of two matrices.
- loha: W + s (w1_a w1_b) * (w2_a w2_b), multiplied value by value.

Here s is alpha / rank; of a lokr with two full matrices it is 1, as in LyCORIS and every reader of its files.

Shapes: W (out, in) or (out, in, height, width); A (rank, in, ...), B (out, rank, ...). Of a lokr w1 (a, c) and w2 (b, d, ...)
with out = a b and in = c d. Matrices `_a` are (rows, rank), `_b` (rank, columns).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from smalti_diffusers.lora.shapes import MAGNITUDE

ADAPTER = "default"
"""What peft calls the trained adapter."""
_PARTS = rf"lora_[AB]|{MAGNITUDE}|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]"
_PARAMETER = re.compile(rf"(?P<layer>.+)\.(?P<part>{_PARTS})\.{ADAPTER}(?:\.weight)?")


def parted(name: str) -> tuple[str, str] | None:
    """The layer and the part of a parameter of the trained adapter, such as `lora_A`; None for any other parameter."""
    found = _PARAMETER.fullmatch(name)
    return (found["layer"], found["part"]) if found else None


def is_full(parts: Mapping[str, object]) -> bool:
    """Whether these parts are a lokr of two full matrices, which has no rank."""
    return "lokr_w1" in parts and "lokr_w2" in parts


def change(parts: Mapping[str, Tensor], scale: float, shape: torch.Size) -> Tensor:
    """What is added to a weight of this shape, before rows are brought to another length."""
    if "lora_A" in parts:
        product = parts["lora_B"].flatten(1) @ parts["lora_A"].flatten(1)
    elif "hada_w1_a" in parts:
        product = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    else:
        product = kronecker(*(factor(parts, number) for number in (1, 2)))
    return (product * scale).reshape(shape)


def factor(parts: Mapping[str, Tensor], number: int) -> Tensor:
    """One of the two factors of a lokr, as one matrix."""
    name = f"lokr_w{number}"
    return parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"]


def kronecker(first: Tensor, second: Tensor) -> Tensor:
    """kron(first, second); the first has no height and width of its own. (out, in * height * width) if the second is flat."""
    return torch.kron(first.reshape(*first.shape, *(1,) * (second.ndim - 2)), second)


def changed(weight: Tensor, parts: Mapping[str, Tensor], scale: float) -> Tensor:
    """The weight with the adapter, of the same shape."""
    whole = weight + change(parts, scale, weight.shape)
    if MAGNITUDE not in parts:
        return whole
    return whole * by_row(parts[MAGNITUDE].flatten() / row_norms(whole), whole.ndim)


def row_norms(weight: Tensor) -> Tensor:
    """(out,) lengths of the rows of a weight."""
    norms: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norms


def by_row(values: Tensor, dimensions: int) -> Tensor:
    """(out,) values as (out, 1, ...)."""
    return values.view(-1, *(1,) * (dimensions - 1))
