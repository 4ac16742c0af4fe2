"""`TrainingState` of ZeRO: from its flat tensors to tensors by parameter name, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from smalti import CheckpointError, UserError
from smalti.models import Weights
from smalti.parallel import Communicator, FlatRange, PortableState, model_tensors, param_groups_of, shape_of
from smalti_deepspeed.resharding import RowSharding
from smalti_deepspeed.zero import Place, Zero, make_optimizer_state, make_state_tensor, optimizer_state

_FORMS = {
    "AdamW": ("DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam"),
    "Adagrad": ("DeepSpeedCPUAdagrad",),
    "Lion": ("DeepSpeedCPULion", "FusedLion"),
    "Joined": ("MuonWithAuxAdam",),
}
_NAMES = {form: name for name, forms in _FORMS.items() for form in forms}
"""What DeepSpeed's own forms of an optimizer are called in checkpoints."""
_STATE_KEYS = {"DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}}
"""By form of an optimizer: own keys of its state that have another name in checkpoints -> that name."""


class ZeroState:
    """Fp32 weights and optimizer state of ZeRO. Made on every rank: *collective*.

    Each element goes straight to the rank that needs it; on one rank nothing is sent.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, zero: Zero, communicator: Communicator) -> None:
        self._model = model
        self._optimizer = optimizer
        self._zero = zero
        self._places = zero.places(model)
        self._groups: dict[int, dict[str, Place]] = {}
        for name, place in self._places.items():
            self._groups.setdefault(place.flat, {})[name] = place
        held = {name: (place.start, place.start + place.length) for name, place in self._places.items()}
        self._rows = RowSharding({name: place.shape for name, place in self._places.items()}, held, communicator)

    def master_weights(self) -> dict[str, Tensor]:
        """This rank's range of each weight that trains, (n,), live, in fp32. Raises UserError if they are on a drive."""
        if self._zero.on_drive:
            raise UserError(
                "EMA needs the fp32 weights in memory, and they are on a drive",
                fix='"offload_optimizer": {"device": "cpu"} in --deepspeed_config, or no --use_ema',
            )
        flats = self._zero.flats()
        return {name: place.of(flats) for name, place in self._places.items()}

    def portable_weights(self, ranges: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._rows.to_rows(ranges)

    def empty_weights(self, ranges: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What files can be read into: the ranges themselves where they are in host memory."""
        return {name: self._flat_range(name, into.dtype, into) for name, into in ranges.items()}

    def _flat_range(self, name: str, dtype: torch.dtype, live: Tensor | None) -> FlatRange:
        place = self._places[name]
        if live is not None and live.device.type == "cpu":
            return FlatRange.of(live, place.shape, place.start)
        return FlatRange.empty(place.length, place.shape, place.start, dtype)

    def copy_from(self, portable: Mapping[str, Tensor], ranges: Mapping[str, Tensor]) -> None:
        """On all ranks, either all of `portable` are `FlatRange`s or none is."""
        if all(isinstance(portable[name], FlatRange) for name in ranges):
            for name, into in ranges.items():
                if portable[name].data_ptr() != into.data_ptr():  # not read straight into it
                    into.copy_(portable[name])
        else:
            self._rows.copy_from(portable, ranges)

    def portable(self) -> PortableState:
        """Copies in host memory, but for buffers, which are the live ones. *Collective*."""
        weights: dict[str, Tensor] = {}
        found: dict[str, dict[str, Tensor]] = {}
        for number, places in self._groups.items():
            with self._zero.present(number):
                flats = self._zero.flats()
                weights |= self.portable_weights({name: place.of(flats) for name, place in places.items()})
                for key, ranges in self._optimizer_state(flats, places).items():
                    whole = next(iter(ranges.values())).ndim == 0
                    for name, tensor in (ranges if whole else self.portable_weights(ranges)).items():
                        found.setdefault(name, {})[key] = tensor
        return PortableState(
            model={**weights, **self._buffers()},
            optimizer_state=found,
            param_groups=self._param_groups(),
            optimizer=self._optimizer_name(),
        )

    def empty(self) -> PortableState:
        """What a checkpoint is read into; sends nothing, and neither does loading it."""
        return PortableState(
            model={
                **{name: self._flat_range(name, torch.float32, self._live(name)) for name in self._places},
                **self._buffers(),
            },
            param_groups=self._param_groups(),
            optimizer=self._optimizer_name(),
            allocate=self._allocate,
        )

    def _live(self, name: str) -> Tensor | None:
        return None if self._zero.on_drive else self._places[name].of(self._zero.flats())

    def _allocate(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        place, live = self._places[name], None
        if not self._zero.on_drive:
            flat = self._zero.flats()[place.flat]
            live = place.within(make_state_tensor(self._optimizer, flat, self._own_keys.get(key, key)))
        return self._flat_range(name, dtype, live)

    @torch.no_grad()
    def load(self, state: PortableState) -> None:
        """Load fp32 weights and optimizer state, then update the parameters that compute. *Collective*."""
        buffers, known = self._buffers(), state.optimizer == self._optimizer_name()
        if odd := (self._places.keys() | buffers.keys()) ^ state.model.keys():
            raise CheckpointError(f"the model has other tensors: {', '.join(sorted(odd)[:3])}")
        if odd := state.optimizer_state.keys() - self._places.keys():
            raise CheckpointError(f"optimizer state of parameters that do not train: {', '.join(sorted(odd)[:3])}")
        for name, buffer in buffers.items():
            buffer.copy_(state.model[name])
        for number, places in self._groups.items():
            with self._zero.present(number, changed=True):
                flats = self._zero.flats()
                self.copy_from(state.model, {name: place.of(flats) for name, place in places.items()})
                if known:
                    self._load_optimizer_state(number, {name: state.optimizer_state.get(name, {}) for name in places})
        if known:
            self._load_param_groups(state.param_groups)
        self._zero.update_parameters()

    def invalidate_gathered(self) -> None:
        """Update the parameters that compute from the fp32 weights."""
        self._zero.update_parameters()

    @torch.no_grad()
    def fill(self, weights: Weights) -> None:
        """Copy these weights into the fp32 weights; each rank reads all that train."""
        for number, places in self._groups.items():
            with self._zero.present(number, changed=True):
                flats = self._zero.flats()
                for name, place in places.items():
                    if place.length:
                        place.of(flats).copy_(weights.get(name).reshape(-1)[place.start : place.start + place.length])

    def _buffers(self) -> dict[str, Tensor]:
        """Those that checkpoints hold, live."""
        tensors = model_tensors(self._model)
        return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}

    def _load_optimizer_state(self, number: int, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Of the parameters of one flat tensor."""
        flats, places = self._zero.flats(), self._groups[number]
        counts: dict[str, float] = {}
        shaped: dict[str, dict[str, Tensor]] = {}
        for name, found in saved.items():
            for key, tensor in found.items():
                if key == "step" or shape_of(tensor) != tuple(places[name].shape):
                    counts[key] = max(counts.get(key, 0.0), float(tensor))
                else:
                    shaped.setdefault(key, {})[name] = tensor
        make_optimizer_state(self._optimizer, flats[number], counts, [self._own_keys.get(key, key) for key in sorted(shaped)])
        live = self._optimizer_state(flats, places)
        for key, tensors in shaped.items():
            for name in live[key].keys() - tensors.keys():
                live[key][name].zero_()  # never stepped where it was saved
            self.copy_from(tensors, {name: live[key][name] for name in tensors})

    def _optimizer_state(self, flats: Sequence[Tensor], places: Mapping[str, Place]) -> dict[str, dict[str, Tensor]]:
        """This rank's ranges, live, by key as in checkpoints, then by parameter."""
        turned: dict[str, dict[str, Tensor]] = {}
        for name, kept in optimizer_state(self._optimizer, flats, places).items():
            for key, tensor in kept.items():
                turned.setdefault(self._portable_keys.get(key, key), {})[name] = tensor
        return turned

    @property
    def _portable_keys(self) -> Mapping[str, str]:
        return _STATE_KEYS.get(type(self._optimizer).__name__, {})

    @property
    def _own_keys(self) -> Mapping[str, str]:
        return {portable: own for own, portable in self._portable_keys.items()}

    def _optimizer_name(self) -> str:
        name = type(self._optimizer).__name__
        known = _NAMES.get(name, name)
        decays_in_gradient = known == "AdamW" and not getattr(self._optimizer, "adam_w_mode", True)
        return "Adam" if decays_in_gradient else known

    def _param_groups(self) -> list[dict[str, object]]:
        """Hyper-parameters alone: what the optimizer steps are no parameters of the model."""
        groups = [{**group, "params": []} for group in self._optimizer.param_groups]
        return param_groups_of(cast(torch.optim.Optimizer, SimpleNamespace(param_groups=groups, state={})), {})

    def _load_param_groups(self, saved: list[dict[str, object]]) -> None:
        """Those that this optimizer has too; DeepSpeed's have not all of torch's."""
        groups = self._optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(f"the optimizer has {len(groups)} parameter groups, its saved state {len(saved)}")
        for group, values in zip(groups, saved, strict=True):
            for key in group.keys() & values.keys():
                value = values[key]
                group[key] = tuple(value) if isinstance(value, list) else value
