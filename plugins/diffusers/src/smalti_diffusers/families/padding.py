"""Padding of captions, of which only values tell where it is."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(mask: Tensor) -> bool:
    """False where FLOPs or memory are counted: on the meta device, and of fake tensors."""
    return not (mask.is_meta or isinstance(mask, FakeTensor))
