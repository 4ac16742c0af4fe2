"""TF32 in the matrix products and convolutions of the model that is trained.

The choice holds for that model alone, forward and backward. Encoders keep torch's own precision: text encoders compute the
angles of their rotary embeddings as a product of fp32 matrices, and what they encode is kept for later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch
from torch import nn

from smalti.config import Config
from smalti.parallel import in_bf16, products


def tf32_choice(config: Config, device: str) -> bool | None:
    """Whether the model's products of fp32 matrices are computed in TF32; None where it has none, or no device to choose it."""
    kind = torch.device(device).type
    return products(config, kind) == "tf32" if kind == "cuda" and not in_bf16(config, kind) else None


@contextmanager
def products_in_tf32(allowed: bool | None) -> Iterator[None]:
    """Inside, on every thread of the process, products of fp32 matrices are computed in TF32 or in fp32; None changes nothing.

    Set through torch's older switches: the newer `fp32_precision` makes `torch.get_float32_matmul_precision` raise, which
    torch.compile still reads (torch 2.13, pytorch/pytorch#166387). The older ones set the newer along with themselves.
    """
    if allowed is None:
        yield
        return
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


def choose_tf32(model: nn.Module, allowed: bool | None) -> None:
    """Make every forward pass of `model` compute its products so. Backward is the loop's to surround.

    `forward` is replaced, below all hooks: call this before the model is wrapped.
    """
    if allowed is not None:
        model.forward = _within(allowed, model.forward)


def _within(allowed: bool, forward: Callable[..., object]) -> Callable[..., object]:
    @wraps(forward)
    def chosen(*arguments: object, **named: object) -> object:
        with products_in_tf32(allowed):
            return forward(*arguments, **named)

    return chosen
