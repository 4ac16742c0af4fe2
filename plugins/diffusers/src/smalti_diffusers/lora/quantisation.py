"""Quantised weights of a frozen model: linear layers that keep their weight in 8 or 4 bits, most of them by way of torchao.

With torchao only storage is quantised. A product is computed with the weight as it is restored from that, in the type of the
inputs, forward and backward; so it works wherever torch can restore the weight, and inputs are never rounded. `eight_bits` has
the layers that multiply in 8 bits.

Shapes: (..., in) inputs, (out, in) weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smalti import FrozenStorage, UserError
from smalti_diffusers.lora.eight_bits import EightBitLinear
from smalti_diffusers.options import Precision

_OFFERED: tuple[Precision, ...] = ("int8-torchao", "nf4-torchao", "int8-rowwise")
"""What plans offer: fp8 takes as much memory as int8, and fewer devices multiply in it."""
_RESTORING: Mapping[Precision, tuple[int, int]] = {
    "int8-torchao": (6, 8),
    "fp8-torchao": (10, 8),
    "nf4-torchao": (14, 20),
    "int8-rowwise": (2, 4),
    "fp8-rowwise": (2, 4),
}
"""Bytes for each value at the peak of restoring a weight of bf16 and of fp32, counted with torchao 0.18."""
_MULTIPLIED: Mapping[Precision, torch.dtype] = {"int8-rowwise": torch.int8, "fp8-rowwise": torch.float8_e4m3fn}
"""In what the layers of a precision multiply, if they do not restore their weights."""
_NF4_GROUP = 64 * 256
"""Values of a weight that share one scale of scales: torchao wants a multiple of so many."""


class QuantisedLinear(nn.Linear):
    """A frozen linear layer: an ordinary one until it has its first weight, which it then keeps quantised.

    The quantised weight is no parameter any more: nothing that spreads, sums, saves or optimizes parameters meets it.
    """

    def __init__(self, linear: nn.Linear, precision: Precision) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.precision = precision

    @property
    def quantised(self) -> bool:
        return "weight" not in self._parameters

    def weights_loaded(self) -> None:
        """Quantise the weight, which has its first values now (`smalti.models.weights.PostLoadTransform`)."""
        weight = self.weight.detach()
        del self.weight
        self.weight = _quantise(weight, self.precision)

    def forward(self, input: Tensor) -> Tensor:
        if not self.quantised:
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = self.bias.to(dtype) if self.bias is not None else None
        return cast(Tensor, _Product.apply(input.to(dtype), self.weight, bias))  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """What `to` and its like do: the weight goes along to another device, and keeps its type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.quantised:
            device = fn(torch.empty(0, device=self.weight.device)).device
            self.weight = self.weight.to(device)
        return self


class _Product(torch.autograd.Function):
    """A linear layer's product. For the way back it keeps the quantised weight, where torch would keep the restored one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, _restored(weight).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient @ _restored(weight).to(gradient.dtype), None, None


def quantise(model: nn.Module, blocks: Collection[str], precision: Precision) -> nn.Module:
    """The same model; what is frozen in its blocks' linear layers will be kept quantised once it has values.

    `blocks` are class names. Adapters, norms, and whatever lies outside of blocks stay as they are, as do layers of a size that
    does not fit. Raises UserError if no layer does.
    """
    found = {path for path, linear in _frozen(model, blocks) if _fits(linear, precision)}
    if not found:
        raise UserError(
            f"no layer of the model can be kept in {precision}", fix="--base_model_precision=no_change, or another one"
        )
    for path in found:
        owner, _, name = path.rpartition(".")
        parent = model.get_submodule(owner)
        linear, kept_as = cast(nn.Linear, parent.get_submodule(name)), _MULTIPLIED.get(precision)
        setattr(parent, name, QuantisedLinear(linear, precision) if kept_as is None else EightBitLinear(linear, kept_as))
    return model


def storage(model: nn.Module, blocks: Collection[str], precision: Precision, unquantised: FrozenStorage) -> list[FrozenStorage]:
    """How the frozen weights of a model are kept that `quantise` had for this precision, then smaller ways.

    `unquantised` has the frozen parameters of the model, whose values may be quantised by now or not. Needs no torchao.
    """
    layers = dict(_frozen(model, blocks))
    kept = unquantised.bytes - sum(each.nbytes for linear in layers.values() for each in _weights(linear))

    def kept_in(precision: Precision) -> FrozenStorage:
        fitting = {path for path, linear in layers.items() if _fits(linear, precision)}
        as_it_is = sum(linear.weight.nbytes for path, linear in layers.items() if path not in fitting)
        sizes = [_kept(layers[path], precision) for path in fitting]
        return FrozenStorage(
            options={"base_model_precision": precision},
            bytes=kept + as_it_is + sum(stored for stored, _ in sizes),
            restoring=max((restoring for _, restoring in sizes), default=0),
            multiplied=precision in _MULTIPLIED,
        )

    if precision != "no_change":
        return [kept_in(precision)]
    return [unquantised, *(kept_in(each) for each in _OFFERED if any(_fits(linear, each) for linear in layers.values()))]


def is_sharded(precision: Precision) -> bool:
    """Whether weights can be sharded: torchao's cannot."""
    return precision == "no_change" or precision in _MULTIPLIED


def check_device(precision: Precision, kind: str) -> None:
    """Raises UserError where this kind of device cannot keep weights so, or cannot multiply them."""
    if precision == "fp8-torchao" and kind == "mps":
        raise UserError("MPS devices have no 8-bit floating-point type", fix="--base_model_precision=int8-torchao")
    if precision in _MULTIPLIED and kind == "mps":
        raise UserError("torch has no products in 8 bits on MPS devices", fix="--base_model_precision=int8-torchao")
    # Where no device is in use yet, as in a launcher, looking at it would take memory on it.
    used = kind == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if precision == "fp8-rowwise" and used and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < (8, 9):
            message = f"products in fp8 need compute capability 8.9 or newer, and this GPU has {major}.{minor}"
            raise UserError(message, fix="--base_model_precision=int8-rowwise")


def _frozen(model: nn.Module, blocks: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the blocks that are no part of an adapter, quantised or not, by their path."""
    for path, block in model.named_modules():
        if type(block).__name__ in blocks:
            for name, module in block.named_modules():
                is_linear = type(module) is nn.Linear and "weight" in module._parameters
                if (is_linear or isinstance(module, QuantisedLinear | EightBitLinear)) and ".lora_" not in f".{name}":
                    yield f"{path}.{name}", cast(nn.Linear, module)


def _weights(linear: nn.Linear) -> list[nn.Parameter]:
    """The parameters that are the weight, which has none once torchao has it."""
    return [each for name, each in linear.named_parameters(recurse=False) if name != "bias"]


def _kept(linear: nn.Linear, precision: Precision) -> tuple[int, int]:
    """Bytes of a quantised weight, and those that restoring it needs at most."""
    dtype = linear.restored_as if isinstance(linear, EightBitLinear) else linear.weight.dtype
    values, item = linear.in_features * linear.out_features, dtype.itemsize
    if precision == "nf4-torchao":
        stored = values // 2 + values // 64 + (values // _NF4_GROUP + 17) * item  # scales, their scales, mean and table
    else:
        stored = values + linear.out_features * (5 if precision == "int8-torchao" else 4)  # scales in fp32, zero points
    return stored, values * _RESTORING[precision][item // 4]


def _fits(linear: nn.Linear, precision: Precision) -> bool:
    return precision != "nf4-torchao" or linear.weight.numel() % _NF4_GROUP == 0


def _quantise(weight: Tensor, precision: Precision) -> Tensor:
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow, to_nf4

    if precision == "nf4-torchao":
        return cast(Tensor, to_nf4(weight))
    kind = Int8Tensor if precision == "int8-torchao" else Float8Tensor
    return cast(Tensor, kind.from_hp(weight, granularity=PerRow()))


def _restored(weight: Tensor) -> Tensor:
    """The values of a quantised weight, in the type that it had before."""
    restore = getattr(weight, "get_original_weight", None) or weight.dequantize  # the name of NF4, the others' name
    return cast(Tensor, restore())
