"""Where DeepSpeed's ZeRO keeps its shards, and what the training loop needs beyond DeepSpeed's own methods.

All stages lay the parameters that train end to end, in a few groups, and give each rank an equal part of every group: a *flat*
tensor of fp32 weights, for which the optimizer keeps its state. Stages 1 and 2 split inside parameters;
stage 3 shards each parameter by itself, padded to a multiple of the ranks. Frozen parameters have no fp32 weights.

Everything that is private to DeepSpeed is touched in this module alone; written for 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from smalti import UserError
from smalti.training import decouple_decay
from smalti_deepspeed.muon import clip_before_muon, sized_as_adamw
from smalti_deepspeed.startup import replaced
from smalti_deepspeed.swapping import swap_whole_pages


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank keeps its elements `start` to `start + length` of a parameter: in flat tensor `flat`, from `offset` on.

    The elements are counted row by row. `shape` is that of the whole parameter.
    """

    shape: torch.Size
    start: int
    length: int
    flat: int
    offset: int

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """The elements, (length,), in memory shared with the flat tensor."""
        return self.within(flats[self.flat])

    def within(self, flat: Tensor) -> Tensor:
        """The same of this one flat tensor, or of its optimizer state."""
        return flat.detach().narrow(0, self.offset, self.length)


class Zero(Protocol):
    """One rank's part of a ZeRO optimizer. From `norm` on, methods are *collective*."""

    @property
    def on_drive(self) -> bool:
        """Whether fp32 weights and optimizer state are on a drive between steps, and in memory only inside `present`."""
        ...

    def flats(self) -> list[Tensor]:
        """The fp32 weights, live, each (n,)."""
        ...

    def present(self, flat: int, *, changed: bool = False) -> AbstractContextManager[None]:
        """Around what uses a flat tensor and its optimizer state, which may be on a drive; writes back `changed` ones."""
        ...

    def places(self, model: nn.Module) -> dict[str, Place]:
        """Of every parameter that trains, by name; of length 0 where this rank has none of it."""
        ...

    def norm(self) -> Tensor:
        """The norm of the whole gradient after the last micro-batch of a step; infinite if anything in it is not finite."""
        ...

    def step(self, norm: Tensor, limit: float, *, by_value: bool = False) -> None:
        """One optimizer step with the gradient, which has this norm, clipped to the norm `limit` (0: no clipping).

        With `by_value` each of its elements is clamped to [-limit, limit] instead.
        """
        ...

    def zero_grad(self) -> None:
        """Clear the gradients without a step."""
        ...

    def update_parameters(self) -> None:
        """Update the parameters that compute from the fp32 weights."""
        ...


def zero_of(engine: DeepSpeedEngine) -> Zero:
    """Raises UserError for what the JSON has made of the engine if it is no ZeRO."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return Stage3(engine, engine.optimizer)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return Stages1And2(engine, engine.optimizer)
    kind = type(engine.optimizer).__name__
    raise UserError(
        f"DeepSpeed made a {kind} of this configuration, which keeps no state that checkpoints can hold",
        fix="zero_optimization.stage 1, 2 or 3; with stage 1 in bf16, no data_types.grad_accum_dtype",
    )


class Stages1And2:
    """Every rank computes with whole parameters; stage 2 keeps only its part of the gradients."""

    on_drive = False

    def __init__(self, engine: DeepSpeedEngine, zero: DeepSpeedZeroOptimizer) -> None:
        self._engine = engine
        self._zero = zero
        if zero.cpu_offload and dist.get_world_size(zero.dp_process_group) == 1:
            add_up_several_alone(zero)

    def flats(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    def present(self, flat: int, *, changed: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def places(self, model: nn.Module) -> dict[str, Place]:
        groups = {id(parameter): number for number, group in enumerate(self._zero.bit16_groups) for parameter in group}
        found: dict[str, Place] = {}
        for name, parameter in model.named_parameters():
            if id(parameter) not in groups:
                continue
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            found[name] = Place(
                shape=parameter.shape,
                start=mapping.lp_fragment_address.start if mapping else 0,
                length=mapping.lp_fragment_address.numel if mapping else 0,
                flat=groups[id(parameter)],
                offset=mapping.hp_fragment_address.start if mapping else 0,
            )
        return found

    def norm(self) -> Tensor:
        self._zero._wait_for_offload_copies()
        return cast(Tensor, self._zero.scaled_global_norm() / self._zero.loss_scale)

    def step(self, norm: Tensor, limit: float, *, by_value: bool = False) -> None:
        zero = self._zero
        zero.clip_grad = limit
        if by_value and limit > 0:
            zero.unscale_and_clip_grads = lambda gradients, _norm: _clamp(gradients, limit)
        zero.scaled_global_norm = lambda norm_type=2: norm * zero.loss_scale  # known by now, and finite
        checks, zero.check_grad_overflow = zero.check_grad_overflow, False
        try:
            self._engine.step()
        finally:
            zero.check_grad_overflow = checks
            del zero.scaled_global_norm
            vars(zero).pop("unscale_and_clip_grads", None)

    def zero_grad(self) -> None:
        """A step that DeepSpeed finds to overflow: it clears all that a micro-batch leaves behind, in whatever mode it is."""
        zero = self._zero
        checks, zero.check_grad_overflow = zero.check_grad_overflow, True
        zero.check_overflow = lambda partition_gradients=True: setattr(zero, "overflow", True)
        try:
            self._engine.step()
        finally:
            zero.check_grad_overflow = checks
            del zero.check_overflow

    def update_parameters(self) -> None:
        self._zero.update_lp_params()


class Stage3:
    """Every rank keeps a part of each parameter; a module's parameters are gathered just before it computes."""

    def __init__(self, engine: DeepSpeedEngine, zero: DeepSpeedZeroOptimizer_Stage3) -> None:
        self._engine = engine
        self._zero = zero
        if zero.swap_optimizer:
            swap_whole_pages(zero.optimizer_swapper)

    def flats(self) -> list[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    @property
    def on_drive(self) -> bool:
        return any(self._zero._swappable_optimizer_subgroup(number) for number in range(len(self._zero.fp16_groups)))

    @contextmanager
    def present(self, flat: int, *, changed: bool = False) -> Iterator[None]:
        zero = self._zero
        swaps = zero._swappable_optimizer_subgroup(flat)
        if swaps:
            zero._optimizer_states_and_gradient_swap_in(flat)
        yield
        if swaps and changed:
            zero._optimizer_states_and_gradient_swap_out(flat)
        elif swaps:
            zero._release_swap_buffers(flat)

    def places(self, model: nn.Module) -> dict[str, Place]:
        zero = self._zero
        found: dict[str, Place] = {}
        for name, parameter in cast(Iterable[tuple[str, Any]], model.named_parameters()):
            if parameter.requires_grad:
                flat, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = min(zero._get_param_partition_rank(parameter) * size, parameter.ds_numel)
                length = min(size, parameter.ds_numel - start)  # the last part is padded
                found[name] = Place(shape=parameter.ds_shape, start=start, length=length, flat=flat, offset=offset)
        return found

    def norm(self) -> Tensor:
        return cast(Tensor, combine_grad_norm_groups(self._zero._get_norm_groups()) / self._zero.loss_scale)

    def step(self, norm: Tensor, limit: float, *, by_value: bool = False) -> None:
        zero = self._zero
        if zero.use_muon:
            clip_before_muon(zero, norm, limit, by_value=by_value)
            limit = 0.0
        zero.clip_grad = limit
        if by_value and limit > 0:
            flats = zero.fp32_partitioned_groups_flat
            zero.unscale_and_clip_grads = lambda number, _norm: _clamp([flats[number].grad], limit)
        try:
            self._step(norm)
        finally:
            vars(zero).pop("unscale_and_clip_grads", None)

    def zero_grad(self) -> None:
        """A step that DeepSpeed finds to overflow: it clears all that a micro-batch leaves behind, in whatever mode it is."""
        zero = self._zero
        zero._apply_muon_to_accumulated_grads = lambda: None
        try:
            self._step(torch.tensor(float("inf")))
        finally:
            del zero._apply_muon_to_accumulated_grads

    def _step(self, norm: Tensor) -> None:
        zero = self._zero
        zero._get_norm_groups = lambda: [norm * zero.loss_scale]  # known by now
        try:
            with sized_as_adamw():
                self._engine.step()
        finally:
            del zero._get_norm_groups

    def update_parameters(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            with self.present(number):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """In place of DeepSpeed's `unscale_and_clip_grads`: gradients of fp32 and bf16 runs are not scaled."""
    for each in gradients:
        each.clamp_(-limit, limit)


@contextmanager
def numbers_sent() -> Iterator[None]:
    """Have engines that are made in this block send first weights to all ranks that are numbers without dimensions, too.

    DeepSpeed sends bytes, as which torch sees only what has a dimension.
    """

    def broadcast(engine: DeepSpeedEngine) -> None:
        for parameter in cast(nn.Module, engine.module).parameters():
            if getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) is ZeroParamStatus.AVAILABLE:
                data = parameter.data if parameter.dim() else parameter.data.view(1)
                dist.broadcast(data.view(torch.uint8), 0)

    with replaced(cast(Any, DeepSpeedEngine), "_broadcast_model", broadcast):
        yield


def add_up_several_alone(zero: DeepSpeedZeroOptimizer) -> None:
    """Have one rank with an offloaded optimizer keep no fp32 sum of the gradients on its device for a single backward pass.

    That takes 4 bytes per parameter, and no gradient is another one without: it is copied to host memory, in fp32, bucket by
    bucket.
    """
    sums = zero._use_compact_grad_partition_buffer
    zero._use_compact_grad_partition_buffer = lambda group: (
        sums(group) and not (zero.micro_step_id == 0 and zero.is_gradient_accumulation_boundary())
    )


def step_with_own_groups(engine: DeepSpeedEngine) -> None:
    """Have ZeRO step with the optimizer whose groups the loop sees, and whose rate it moves.

    For torch's Adagrad, DeepSpeed makes another one over its flat tensors: in one group, so that it loses sight of all others;
    and with a rate that stays as it was.
    """
    zero, own = cast(Any, engine.optimizer), engine.basic_optimizer
    if zero.optimizer is own:
        return
    own.state.clear()  # that of the parameters before they were sharded
    own.state.update(zero.optimizer.state)
    zero.optimizer = own
    if isinstance(zero, DeepSpeedZeroOptimizer):
        zero._link_all_hp_params()


def correct_bias_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Make DeepSpeed's CPUAdam compute the same whether or not the run was resumed in between; no effect on others.

    It multiplies its bias correction from step to step, but uses a power if its step count jumps, which rounds differently.
    With a step count that is reset before every step it always uses the power.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    values = optimizer.defaults

    def begin_anew(*_: object) -> None:
        settings = (values["lr"], *values["betas"], values["eps"], values["weight_decay"], optimizer.adam_w_mode)
        optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *settings, False)

    optimizer.register_step_pre_hook(begin_anew)


def decay_as_the_core_does(optimizer: torch.optim.Optimizer) -> None:
    """Make an Adagrad that DeepSpeed has built decay weights as `--optimizer=adagrad` does under every other strategy."""
    if isinstance(optimizer, torch.optim.Adagrad | DeepSpeedCPUAdagrad):
        decouple_decay(optimizer)


def optimizer_state(
    optimizer: torch.optim.Optimizer, flats: Sequence[Tensor], places: Mapping[str, Place]
) -> dict[str, dict[str, Tensor]]:
    """This rank's range of every tensor of the state, live, by parameter and key. Numbers, such as step counts, are scalars."""
    found: dict[str, dict[str, Tensor]] = {}
    numbers: dict[tuple[int, str], Tensor] = {}  # read once: each has to come from the accelerator
    for name, place in places.items():
        flat = flats[place.flat]
        for key, value in optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                found.setdefault(name, {})[key] = place.within(value)
            elif isinstance(value, Tensor | int | float):
                if (place.flat, key) not in numbers:
                    numbers[place.flat, key] = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
                found.setdefault(name, {})[key] = numbers[place.flat, key].clone()
    return found


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, flat: Tensor, counts: Mapping[str, float], keys: Sequence[str]
) -> None:
    """Allocate the optimizer state of one flat tensor, also before its first step: tensors `keys`, numbers `counts`.

    Without both, its state is removed.
    """
    kept = optimizer.state.get(flat, {})
    for key in kept.keys() - keys:
        del kept[key]
    if not keys and not counts:
        optimizer.state.pop(flat, None)
        return
    for key in keys:
        make_state_tensor(optimizer, flat, key)
    for key, number in counts.items():
        optimizer.state[flat][key] = _count(optimizer, flat, number)


def _count(optimizer: torch.optim.Optimizer, flat: Tensor, number: float) -> Tensor | int:
    """A step count as the optimizer wants it: torch's own count in a tensor, beside the flat one where a kernel there reads it.

    DeepSpeed's count in a number.
    """
    optimizer = getattr(optimizer, "aux_optimizer", None) or optimizer  # what steps beside a Muon
    if not type(optimizer).__module__.startswith("torch."):
        return int(number)
    by_kernel = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return torch.tensor(number, dtype=torch.float32, device=flat.device if by_kernel else "cpu")


def make_state_tensor(optimizer: torch.optim.Optimizer, flat: Tensor, key: str) -> Tensor:
    """The tensor `key` of the state of a flat tensor, live: the existing one, or zeros."""
    state = optimizer.state[flat]
    value = state.get(key)
    if not isinstance(value, Tensor) or value.shape != flat.shape:
        value = state[key] = torch.zeros_like(flat, dtype=torch.float32, requires_grad=False)
    return value
