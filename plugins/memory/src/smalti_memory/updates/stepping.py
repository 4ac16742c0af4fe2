"""Optimizers that step some parameters at a time: in fp32 copies where weights are in bf16, or within the backward pass.

Both work with any optimizer that treats every parameter by itself. It stays an object of its own class, of the same name, so
that checkpoints know its state by whichever way it is stepped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti import ExitCode, UserError
from smalti.parallel import portable_name
from smalti.training import grouped, local_part
from smalti_memory.updates.rounding import key_of, round_into

Rounding = Literal["stochastic", "kahan"]
_REST = "rounding_rest"
"""Key of optimizer state: what rounding took away from a weight, bf16 in the parameter's shape."""
_STEPS = "rounded_steps"
"""Key of a parameter group: the steps with stochastic rounding. Not there before the first one: what a group has from the
beginning is a hyper-parameter, which a resumed run takes from its options."""


class NonFiniteGradientError(UserError):
    """A gradient is not finite, and weights were updated with it already."""

    exit_code = ExitCode.FAILED

    def __init__(self) -> None:
        super().__init__(
            "a gradient is not finite, and release_gradients has updated weights with it, which are not saved",
            fix="resume from the last checkpoint, which the same command does; with --no_release_gradients such a step can be "
            "skipped",
        )


class StepsInPieces(torch.optim.Optimizer):
    """Mixed into the class of an optimizer, which then steps pieces of bounded memory, one after the other.

    With a `rounding`, weights are in bf16 and are stepped as fp32 copies of one piece, as are their gradients: the optimizer's
    state is what it would be for fp32 weights. Stochastic: the result is rounded at random. Kahan: what rounding takes away
    is kept, and is a part of the weight again in the next step.
    """

    def start(self, seed: int, rounding: Rounding | None) -> None:
        """Called once, after the optimizer was made with named parameters."""
        self._seed, self._rounding = seed, rounding
        named = {
            portable_name(name): parameter
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        begins = _begins(named)
        self._places = {id(parameter): (name, begins[name]) for name, parameter in named.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            waiting = [parameter for parameter in group["params"] if parameter.grad is not None]
            for piece in grouped([4 * parameter.numel() for parameter in waiting]):  # whole tensors: the same on every rank
                self._step_piece(group, [waiting[number] for number in piece])
        if self._rounding == "stochastic":
            for group in self.param_groups:
                group[_STEPS] = group.get(_STEPS, 0) + 1

    def _step_piece(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Let the optimizer step these parameters of a group alone."""
        stepped = parameters if self._rounding is None else [self._in_fp32(parameter) for parameter in parameters]
        groups, alone = self.param_groups, {**group, "params": list(stepped)}
        self.param_groups = [alone]
        try:
            super().step()
        finally:
            self.param_groups = groups
        if any(alone.get(key) != value for key, value in group.items() if key != "params") or len(alone) > len(group):
            raise UserError(
                f"the optimizer {type(self).__name__} keeps numbers for all parameters together, and cannot step them one "
                "after the other, as release_gradients and weights_dtype=bf16 do",
                fix="--optimizer=adamw, or --no_release_gradients --weights_dtype=fp32",
            )
        if self._rounding is not None:
            for parameter, copy in zip(parameters, stepped, strict=True):
                self._round(parameter, copy, group)

    def _in_fp32(self, parameter: Tensor) -> Tensor:
        """A copy of a bf16 weight to step, with its gradient and optimizer state."""
        assert parameter.grad is not None
        weight, gradient = (_exact(local_part(each)) for each in (parameter.detach(), parameter.grad))
        state = self.state.pop(parameter, {})
        if (rest := state.pop(_REST, None)) is not None:
            weight += local_part(rest)
        copy = _with_local(parameter, weight)
        copy.grad = _with_local(parameter, gradient)
        if state:
            self.state[copy] = state
        return copy

    def _round(self, parameter: Tensor, copy: Tensor, group: Mapping[str, Any]) -> None:
        """Give a parameter the weight and the optimizer state of its copy."""
        name, begin = self._places[id(parameter)]
        self.state[parameter] = state = self.state.pop(copy, {})
        weight, exact = local_part(parameter.detach()), local_part(copy)
        if self._rounding == "kahan":
            weight.copy_(exact)
            state[_REST] = _with_local(parameter, exact.sub_(weight).to(weight.dtype))
            return
        rounded = torch.empty(exact.numel(), dtype=weight.dtype, device=weight.device)
        round_into(rounded, exact.view(-1), begin, key_of(self._seed, group.get(_STEPS, 0), name))
        weight.copy_(rounded.view(exact.shape))


class ReleasesGradients(StepsInPieces):
    """Steps each parameter in the backward pass, as soon as its gradient is there, and frees the gradient.

    Follows `smalti.training.StepsInBackward`.
    """

    steps = True

    def release(self, *, value_limit: float, norm_limit: float) -> None:
        """From now on. Limits are of each element, and of the norm of each gradient; 0: none."""
        self._value_limit, self._norm_limit = value_limit, norm_limit
        self._squares: list[Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._at_gradient, group))

    @torch.no_grad()
    def _at_gradient(self, group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self.steps:
            gradient = local_part(parameter.grad)
            square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
            self._squares.append(square)
            if self._value_limit:
                gradient.clamp_(-self._value_limit, self._value_limit)
            if self._norm_limit:
                norm = _sum_over_shards(square.clone(), parameter).sqrt_()
                gradient.mul_((self._norm_limit / (norm + 1e-6)).clamp_(max=1.0))
            self._step_piece(group, [parameter])
        parameter.grad = None

    def released_norm(self) -> Tensor:
        """The global norm of the gradients since the last call, before they were clipped. *Collective*.

        Raises NonFiniteGradientError on every rank.
        """
        first = self.param_groups[0]["params"][0]
        if not self._squares:
            return torch.zeros((), device=local_part(first).device)
        norm = _sum_over_shards(torch.stack(self._squares).sum(), first).sqrt_()
        self._squares.clear()
        if not math.isfinite(norm.item()):
            raise NonFiniteGradientError
        return norm


def in_pieces(optimizer: torch.optim.Optimizer, mixin: type[StepsInPieces]) -> Any:
    """The same optimizer, with the mixin in a class of the same name. Raises UserError for one that consists of others."""
    if getattr(optimizer, "parts", ()):
        message = f"the optimizer {type(optimizer).__name__} consists of several, and cannot step some parameters alone"
        raise UserError(message, fix="--optimizer=adamw, or --no_release_gradients --weights_dtype=fp32")
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # a step is left out here, not by its kernels
    optimizer.__class__ = cast(Any, type(type(optimizer).__name__, (mixin, type(optimizer)), {}))
    return optimizer


def _begins(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Where in each whole tensor, flattened, this rank's part of it begins."""
    begins = dict.fromkeys(named, 0)
    sharded = {name: parameter for name, parameter in named.items() if isinstance(parameter, DTensor)}
    if not sharded:
        return begins
    from smalti.checkpoint import local_chunks

    for name, chunk in local_chunks(sharded).items():
        whole = sharded[name].shape
        if chunk.shape and chunk.shape[1:] != whole[1:]:
            raise UserError(f"{name} is not divided into ranges of its first dimension", fix="--weights_dtype=fp32")
        begins[name] = chunk.offsets[0] * whole[1:].numel() if chunk.offsets else 0
    return begins


def _exact(tensor: Tensor) -> Tensor:
    """A copy in fp32 and in one piece."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _with_local(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread like the parameter. It stays where it is, which may be in host memory."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements, like = parameter.device_mesh, parameter.placements, part.to("meta")
    made = DTensor.from_local(like, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return DTensor(part, made._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _sum_over_shards(value: Tensor, parameter: Tensor) -> Tensor:
    """The sum of a number over the ranks that share a parameter, in place. *Collective* where it is sharded."""
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(value, group=parameter.device_mesh.get_group(number))
    return value
