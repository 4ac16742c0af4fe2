"""AdamW with its moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.training import local_part
from smalti_optimizers.steps import count_step, redistributed, sharded_like, with_gradients

_BLOCK = range(256, 15, -1)
"""Lengths of a block, the best first."""
_SMALLEST = 4096
"""Elements of a parameter below which its moments stay in fp32."""
_AT_ONCE = {"cpu": 2**17}
"""Elements that are stepped together, by type of device: as much as fits into a cache."""
_AT_ONCE_ELSEWHERE = 2**24
"""What is in fp32 for the time of a step is a few times as large."""
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they have a sign."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are codes of 8 bits with an fp32 scale per block: 2 bytes and a little per weight instead of 8.

    Blocks are equal parts of a row, that is of `parameter[i]`, of at most 256 elements. A rank has complete rows of a sharded
    parameter. So the moments are the same on any number of ranks, and a checkpoint is resumed exactly on another number.
    Parameters that are small, or whose rows cannot be divided so, have moments in fp32.

    State: "step", "exp_avg" and "exp_avg_sq" in the parameter's shape, uint8 or fp32, and with uint8 "exp_avg_scale" and
    "exp_avg_sq_scale", (rows, blocks in a row).
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._codes: dict[tuple[bool, torch.device], Codes] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in with_gradients(group):
                self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_empty_moments(parameter))
        number = count_step(state)
        for name in _SIGNED:
            if f"{name}_scale" in state:
                state[f"{name}_scale"] = _sharded_like(state[f"{name}_scale"], parameter)
        assert parameter.grad is not None
        weight, gradient = _rows(local_part(parameter)), _rows(local_part(parameter.grad))
        if not weight.numel():
            return  # this rank has no row of it
        moments = {name: _rows(local_part(tensor)) for name, tensor in state.items() if name != "step"}
        rows = max(1, _AT_ONCE.get(weight.device.type, _AT_ONCE_ELSEWHERE) // (weight.numel() // len(weight)))
        for begin in range(0, len(weight), rows):
            piece = slice(begin, begin + rows)
            self._update(weight[piece], gradient[piece], {name: each[piece] for name, each in moments.items()}, number, group)

    def _update(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: int, group: dict[str, Any]) -> None:
        """One step of some rows. It uses the moments before they are rounded to 8 bits."""
        (beta1, beta2), rate = group["betas"], group["lr"]
        average, square = (self._read(moments, name) for name in _SIGNED)
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._write(moments, "exp_avg", average)
        self._write(moments, "exp_avg_sq", square)
        denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(average, denominator, value=-rate / (1 - beta1**step))

    def _read(self, moments: dict[str, Tensor], name: str) -> Tensor:
        """A moment in fp32: the live one, or decoded."""
        codes, scale = moments[name], moments.get(f"{name}_scale")
        if scale is None:
            return codes
        values = self._codes_of(name, codes.device).decoded(codes)
        return values.view(*scale.shape, -1).mul_(scale.unsqueeze(-1)).view(codes.shape)

    def _write(self, moments: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Round a moment to the nearest codes, relative to the largest absolute value of each block."""
        codes, scale = moments[name], moments.get(f"{name}_scale")
        if scale is None:
            return  # the live one was changed in place
        blocks = value.view(*scale.shape, -1)
        scale.copy_(blocks.abs().amax(-1))
        relative = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        codes.copy_(self._codes_of(name, codes.device).nearest(relative).view(codes.shape))

    def _codes_of(self, name: str, device: torch.device) -> Codes:
        key = _SIGNED[name], device
        if key not in self._codes:
            self._codes[key] = Codes(signed=_SIGNED[name], device=device)
        return self._codes[key]


class Codes:
    """The values of the codes on a device, and which code is the nearest to a number in [-1, 1].

    A table has the answer for the upper 16 bits of a number, of which none leaves more than two codes: a binary search in 255
    edges takes a hundred times as long on CPUs.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        values = torch.tensor(codebook(signed=signed))
        edges = (values[1:] + values[:-1]) / 2
        upper = torch.arange(2**16, dtype=torch.int32)
        least = ((upper << 16) + (upper >= 2**15) * (2**16 - 1)).to(torch.int32).view(torch.float32)
        self._values = values.to(device)
        self._edges = torch.cat([edges, torch.tensor([torch.inf])]).to(device)
        self._codes = torch.bucketize(least.nan_to_num(), edges, out_int32=True, right=True).to(device)

    def decoded(self, codes: Tensor) -> Tensor:
        """The values of codes, uint8 of any shape: (n,), row by row."""
        return self._values.index_select(0, codes.to(torch.int32, memory_format=torch.contiguous_format).view(-1))

    def nearest(self, numbers: Tensor) -> Tensor:
        """The codes of these numbers, contiguous fp32 of any shape: (n,), int32."""
        numbers = numbers.view(-1)
        lower = self._codes.index_select(0, (numbers.view(torch.int32) >> 16) & 0xFFFF)
        return lower.add_(numbers >= self._edges.index_select(0, lower))


def codebook(*, signed: bool) -> list[float]:
    """The 256 values of the codes, ascending, in [-1, 1] or [0, 1]: the dynamic data type of the paper.

    Seven decades, each with twice as many values as the one below it, evenly spaced; 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        decade = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += [*decade, *(-value for value in decade)] if signed else decade
    return sorted(values)


def block_length(shape: torch.Size) -> int | None:
    """Elements in a block of a parameter of this shape; None if its moments stay in fp32."""
    if len(shape) < 2 or shape.numel() < _SMALLEST:
        return None
    row = shape[1:].numel()
    return next((length for length in _BLOCK if row % length == 0), None)


def _empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Zeros, as codes with scales or in fp32."""
    block = block_length(parameter.shape)
    if block is None:
        return {name: torch.zeros_like(parameter) for name in _SIGNED}
    found: dict[str, Tensor] = {}
    for name in _SIGNED:
        # The code of a zero does not matter: its scale is 0.
        found[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        found[f"{name}_scale"] = _empty_scale(parameter, parameter.shape[1:].numel() // block)
    return found


def _empty_scale(parameter: Tensor, blocks: int) -> Tensor:
    part = local_part(parameter)
    scale = torch.zeros(len(part), blocks, device=part.device)
    if not isinstance(parameter, DTensor):
        return scale
    return sharded_like(parameter, scale, torch.Size((len(parameter), blocks)))


def _sharded_like(scale: Tensor, parameter: Tensor) -> Tensor:
    """Scales sharded like their parameter: a checkpoint is read into a plain tensor, with those of all ranks."""
    if isinstance(parameter, DTensor) and not isinstance(scale, DTensor):
        return redistributed(scale, parameter)
    return scale


def _rows(tensor: Tensor) -> Tensor:
    """A number without dimensions as one row; others as they are."""
    return tensor if tensor.dim() else tensor.view(1)
