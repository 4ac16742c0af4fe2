"""Which of torch's kernels computes `scaled_dot_product_attention` in the model that is trained.

The choice holds for that model alone, forward and backward; encoders and autoencoders keep torch's own, because few kernels can
do what theirs need (masks, one wide head).

Shapes: B batch, H heads, L tokens, D width of a head; queries, keys and values (B, H, L, D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

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


_SMALL = 2**14
"""L x D up to which torch's kernel for the CPU takes less time in fp32: a quarter of it at 80 x 32, as much at 256 x 64 (torch
2.13, a processor with AMX; others gain more). In bf16 the backward pass is slow, because its matrix products are so small."""


def attention_kernel(kernel: Kernel) -> AbstractContextManager[None]:
    """Attention is computed by this kernel inside, on every thread; "auto" lets torch choose."""
    return nullcontext() if kernel == "auto" else sdpa_kernel([_BACKENDS[kernel]])


class SmallInFp32(TorchFunctionMode):
    """While this is entered, small attention in bf16 is computed in fp32; what comes out is in bf16 as ever."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: object, **kwargs: object
) -> Tensor:
    computes = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    own: Callable[..., Tensor] = F.scaled_dot_product_attention
    if computes is not torch.bfloat16 or key.shape[-2] * key.shape[-1] > _SMALL:
        return own(query, key, value, attn_mask, *args, **kwargs)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    with torch.autocast("cpu", enabled=False):
        return own(query.float(), key.float(), value.float(), attn_mask, *args, **kwargs).to(computes)


def choose_attention(model: nn.Module, kernel: Kernel, device: str) -> None:
    """Make every forward pass of `model` use this kernel. Backward, which may compute parts again, is the loop's to surround.

    With "auto", small attention on the CPU is computed in fp32: in every module that calls itself attention, so that what is
    computed again is computed alike. Compiled blocks keep torch's own. `forward` is replaced, below all hooks: call this before
    the model is wrapped.
    """
    if kernel != "auto":
        forward_within(model, partial(_explained, kernel))
    elif torch.device(device).type == "cpu":
        for module in model.modules():
            if "Attention" in type(module).__name__:  # no mode where torch.compile traces: it would end every graph
                forward_within(module, lambda: nullcontext() if torch.compiler.is_compiling() else SmallInFp32())


def forward_within(module: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Replace the module's `forward` by one that enters a new context each time."""
    forward = module.forward

    @wraps(forward)
    def within(*arguments: object, **named: object) -> object:
        with context():
            return forward(*arguments, **named)

    module.forward = within


@contextmanager
def _explained(kernel: Kernel) -> Iterator[None]:
    """`attention_kernel`, with an error that says what to do where the kernel cannot compute something."""
    try:
        with attention_kernel(kernel):
            yield
    except RuntimeError as error:
        if not str(error).startswith(_REFUSALS):
            raise
        raise UserError(
            f"the kernel '{kernel}' cannot compute the attention of this model here: a mask, the size of its heads, the"
            " precision or the device rules it out; torch's warnings above may say which",
            fix="--sdpa_backend=auto, or another kernel",
        ) from error
