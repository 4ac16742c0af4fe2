"""Which of torch's kernels computes `scaled_dot_product_attention` in the model that is trained.

The choice holds for that model alone, forward and backward; encoders and autoencoders keep torch's own, because few kernels can
do what theirs need (masks, one wide head).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Literal

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from smalti.errors import UserError

Kernel = Literal["auto", "flash", "efficient", "cudnn", "math"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_REFUSALS = ("No available kernel", "No viable backend")
"""Of torch, when the only kernel that is left to it cannot compute what it is asked."""


def attention_kernel(kernel: Kernel) -> AbstractContextManager[None]:
    """Attention is computed by this kernel inside, on every thread; "auto" lets torch choose."""
    return nullcontext() if kernel == "auto" else sdpa_kernel([_BACKENDS[kernel]])


def choose_attention(model: nn.Module, kernel: Kernel) -> None:
    """Make every forward pass of `model` use this kernel. Backward, which may compute parts again, is the loop's to surround.

    The `forward` of the module is replaced, below all hooks: call it before the model is wrapped.
    """
    if kernel != "auto":
        model.forward = _within(kernel, model.forward)


def _within(kernel: Kernel, forward: Callable[..., object]) -> Callable[..., object]:
    @wraps(forward)
    def chosen(*arguments: object, **named: object) -> object:
        try:
            with attention_kernel(kernel):
                return forward(*arguments, **named)
        except RuntimeError as error:
            if not str(error).startswith(_REFUSALS):
                raise
            raise UserError(
                f"the kernel '{kernel}' cannot compute the attention of this model here: a mask, the size of its heads, the"
                " precision or the device rules it out; torch's warnings above may say which",
                fix="--sdpa_backend=auto, or another kernel",
            ) from error

    return chosen
