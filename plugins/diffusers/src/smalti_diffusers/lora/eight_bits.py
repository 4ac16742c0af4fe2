"""Linear layers of a frozen model that multiply in 8 bits: int8 or e4m3, with a scale for each row of inputs and of the weight.

Inputs are quantised when they come; the weight was when it was loaded. Products are exact sums of products of integers (fp32
sums on a CPU), or fp32 sums of those of e4m3, and only then scaled. Gradients of inputs come from the restored weight, without
rounding them to 8 bits.

Weight and scale are parameters that do not train, kept as integers: FSDP2 casts only floating-point parameters to the type in
which it gathers, and would cast e4m3 and scales, too. A rank that has some rows of a weight has their scales.

Shapes: (..., in) inputs, (rows, in) the same as a matrix, (out, in) weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smalti.models import Weights, first_weight

_SCALE = "weight_scale"
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest value of a type."""
_FEW = 16
"""Up to so many rows are multiplied with the restored weight: `torch._int_mm` takes no fewer on CUDA, and nothing is gained."""
_ALIGNED = 16
"""What sizes of a weight must be multiples of for a product in 8 bits; 8 would do for `torch._int_mm`."""
_LONGEST = 2**31 // 127**2
"""How many products of int8 can be summed in int32 at most."""


class EightBitLinear(nn.Linear):
    """A frozen linear layer with its weight in 8 bits.

    `weight` (out, in) int8 has the numbers, or the bits of e4m3; `weight_scale` (out, 1) int32 the bits of fp32. Both come from
    `eight_bit_weights`. A layer of a size without products in 8 bits uses the restored weight.
    """

    def __init__(self, linear: nn.Linear, kept_as: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kept_as, self.restored_as = kept_as, linear.weight.dtype
        device = linear.weight.device
        numbers = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        scale = torch.empty(self.out_features, 1, dtype=torch.int32, device=device)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        given = (input, self.weight, self.weight_scale, self.bias, self.kept_as, dtype)
        return cast(Tensor, _Product.apply(*given))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """For the way back it keeps the weight as it is stored, and nothing of the inputs."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        inputs: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        kept_as: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.kept_as, ctx.came_as = kept_as, inputs.dtype  # type: ignore[attr-defined]
        rows, weight, scale = inputs.flatten(0, -2), weight.view(kept_as), scale.view(torch.float32)
        if len(rows) <= _FEW or any(size % _ALIGNED for size in weight.shape) or weight.shape[1] > _LONGEST:
            return F.linear(inputs.to(dtype), _restored(weight, scale, dtype), bias.to(dtype) if bias is not None else None)
        numbers, scales = quantised(rows, kept_as)
        product = _in_int8 if kept_as == torch.int8 else _in_e4m3
        return product(numbers, scales, weight, scale, bias).to(dtype).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        restored = _restored(weight.view(ctx.kept_as), scale.view(torch.float32), gradient.dtype)  # type: ignore[attr-defined]
        return (gradient @ restored).to(ctx.came_as), None, None, None, None, None  # type: ignore[attr-defined]


def _in_int8(numbers: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """On a CPU in fp32: without VNNI its sums of pairs saturate at 16 bits (oneDNN's int8 on AVX2)."""
    on_cpu = numbers.device.type == "cpu"
    product = (numbers.float() @ weight.t().float() if on_cpu else torch._int_mm(numbers, weight.t())) * scales
    return product * scale.t() if bias is None else torch.addcmul(bias, product, scale.t())


def _in_e4m3(numbers: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """In bf16: CUDA has no other type for sums with a scale for each row."""
    bias = bias.to(torch.bfloat16) if bias is not None else None
    return torch._scaled_mm(
        numbers, weight.t(), scale_a=scales, scale_b=scale.t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _restored(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a floating-point type; each value is rounded once."""
    return weight.to(dtype).mul_(scale)


def quantised(rows: Tensor, kept_as: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and the fp32 scales of its rows, (rows, 1). What is not finite in a row makes its scale so."""
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scales = (largest / _LIMITS[kept_as]).clamp_(min=torch.finfo(torch.float32).tiny)  # of rows of zeros
    numbers = rows / scales
    return (numbers.round_() if kept_as == torch.int8 else numbers).to(kept_as), scales


def eight_bit_weights(weights: Weights, model: nn.Module) -> Weights:
    """The first weights of a model whose `EightBitLinear` layers are unquantised in `weights`."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, EightBitLinear)}
    return _Quantised(weights, layers) if layers else weights


class _Quantised:
    """`Weights` with those of `layers` in 8 bits. They are quantised when they are read, in host memory."""

    def __init__(self, weights: Weights, layers: Mapping[str, EightBitLinear]) -> None:
        self._weights = weights
        self._layers = layers
        self._scales: dict[tuple[str, int, int | None], Tensor] = {}
        """By layer and rows, of weights that were read before their scales."""

    def names(self) -> Iterator[str]:
        yield from self._weights.names()
        yield from (f"{layer}.{_SCALE}" for layer in self._layers)

    def get(self, name: str) -> Tensor:
        rows = self.quantised_rows(name, 0, None)
        return self._weights.get(name) if rows is None else rows

    def quantised_rows(self, name: str, start: int, stop: int | None) -> Tensor | None:
        """Some rows of a weight or scale of these layers, the same as in all of it; None for the name of another tensor.

        Only these rows are quantised, for a rank that keeps no others. Raises UserError and KeyError as reading weights does.
        """
        layer, _, part = name.rpartition(".")
        if layer not in self._layers or part not in ("weight", _SCALE):
            return None
        key = layer, start, stop
        if part == _SCALE and key in self._scales:
            return self._scales.pop(key)
        module = self._layers[layer]
        rows = first_weight(self._weights, f"{layer}.weight", module.weight)[start:stop]
        numbers, scales = quantised(rows.float(), module.kept_as)
        if part == _SCALE:
            return scales.view(torch.int32)
        self._scales[key] = scales.view(torch.int32)
        return numbers.view(torch.int8)
