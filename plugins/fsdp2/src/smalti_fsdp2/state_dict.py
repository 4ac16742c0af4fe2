"""State dicts of a model and its optimizer, in torch's forms, as the contents of a checkpoint.

The optimizer's is found by its `param_groups`, at the top or below any key, nested ("state" > PARAMETER > KEY) or flattened
("state.PARAMETER.KEY"). The model's is the one with the parameters that the optimizer updates, or with a usual name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from smalti import CheckpointError
from smalti.checkpoint import NAMES, Contents, StoredTensor, guess_optimizer, hyperparameters, memory
from smalti.parallel import portable_name
from smalti_fsdp2.dcp_metadata import Key

_MODELS = frozenset(("model", "module", "state_dict", "model_state_dict", "net", "network", "transformer", "unet"))
_GROUPS, _STATE, _STEPS = "param_groups", "state", ("step", "global_step")


class Value(Protocol):
    """A saved value. `dtype` and `shape` are None if it is not a tensor."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def shape(self) -> tuple[int, ...] | None: ...

    def load(self) -> object:
        """The full tensor on the CPU, or the plain value."""
        ...


@dataclass(kw_only=True)
class _Sorted:
    """Saved values by kind. `optimizer_state` is by parameter and key, `groups` by parameter or number, and key."""

    weights: dict[Key, dict[str, Value]] = field(default_factory=dict)
    optimizer_state: dict[tuple[str, str], Value] = field(default_factory=dict)
    groups: dict[str | int, dict[str, Value]] = field(default_factory=dict)
    others: dict[Key, Value] = field(default_factory=dict)


class StateDicts:
    """The contents of a checkpoint, from saved values and their places in the state dicts.

    Raises CheckpointError if it is not clear which of them are the weights.
    """

    def __init__(self, folder: Path, values: Mapping[Key, Value]) -> None:
        found = _sort(folder, values)
        weights = found.weights.pop(_model_key(folder, found))
        named = {f"model/{portable_name(name)}": value for name, value in weights.items()}
        optimizer_state = {(portable_name(name), own_key): value for (name, own_key), value in found.optimizer_state.items()}
        named |= {f"optimizer/{name}.{own_key}": value for (name, own_key), value in optimizer_state.items()}
        self._values = named
        optimizer = guess_optimizer({own_key for _, own_key in optimizer_state})
        left_out = [".".join(map(str, key)) for key in found.others if key[-1] not in _STEPS]
        left_out += [".".join(map(str, key)) or "the top" for key in found.weights]
        step, guessed = _step(found)
        self.contents = Contents(
            tensors={name: _stored(name, value) for name, value in named.items()},
            step=step,
            optimizer=optimizer,
            param_groups=_param_groups(found.groups),
            notices=tuple(_notices(optimizer, optimizer_state, guessed, left_out)),
        )

    def read(self, name: str) -> list[memoryview]:
        return [memory(_tensor(self._values[name], name))]


def _sort(folder: Path, values: Mapping[Key, Value]) -> _Sorted:
    found = _Sorted()
    optimizers = {at for key in values if (at := _before_groups(key)) is not None}
    if len(optimizers) > 1:
        names = " and ".join(sorted(".".join(map(str, at)) for at in optimizers))
        raise CheckpointError(f"{folder} contains several optimizers, {names}; a checkpoint of smalti has one")
    for key, value in values.items():
        inside = next((key[len(at) :] for at in optimizers if key[: len(at)] == at), ())
        if (place := _group_place(inside)) is not None:
            found.groups.setdefault(place[0], {})[place[1]] = value
        elif value.shape is not None and (own_key := _state_place(inside)) is not None:
            found.optimizer_state[own_key] = value
        elif value.shape is not None and isinstance(key[-1], str):
            found.weights.setdefault(key[:-1], {})[key[-1]] = value
        else:
            found.others[key] = value
    return found


def _before_groups(key: Key) -> Key | None:
    """The place of the optimizer's state dict, if this key belongs to one of its parameter groups."""
    return next((key[:n] for n, part in enumerate(key) if str(part).partition(".")[0] == _GROUPS), None)


def _group_place(inside: Key) -> tuple[str | int, str] | None:
    """(0, "lr") or ("blocks.0.weight", "lr"), from the place of a value in the optimizer's state dict."""
    match inside:
        case (part, int(number), str(setting)) if part == _GROUPS:
            return number, setting
        case (str(part),) if part.startswith(f"{_GROUPS}."):
            name, _, setting = part.removeprefix(f"{_GROUPS}.").rpartition(".")
            return name, setting
    return None


def _state_place(inside: Key) -> tuple[str, str] | None:
    """("blocks.0.weight", "exp_avg"), from the place of a value in the optimizer's state dict."""
    match inside:
        case (part, str(name), str(own_key)) if part == _STATE:
            return name, own_key
        case (str(part),) if part.startswith(f"{_STATE}."):
            name, _, own_key = part.removeprefix(f"{_STATE}.").rpartition(".")
            return (name, own_key) if name else None
    return None


def _model_key(folder: Path, found: _Sorted) -> Key:
    """The place of the model's state dict. Raises CheckpointError if it is not unique."""
    stepped = {name for name, _ in found.optimizer_state}
    named = [key for key in found.weights if not key or key[-1] in _MODELS]
    fitting = [key for key, weights in found.weights.items() if stepped and stepped <= weights.keys()]
    for candidates in (fitting, named, list(found.weights)):
        if len(candidates) == 1:
            return candidates[0]
    if not found.weights:
        raise CheckpointError(f"{folder} has no weights", fix="use the folder that contains them")
    places = ", ".join(sorted(".".join(map(str, key)) or "the top" for key in found.weights))
    raise CheckpointError(f"{folder} contains several state dicts, {places}, and it is not clear which is the model's")


def _stored(name: str, value: Value) -> StoredTensor:
    if value.dtype is None or value.shape is None or value.dtype not in NAMES:
        raise CheckpointError(f"{name} is of type {value.dtype}, which a checkpoint cannot hold")
    return StoredTensor(dtype=NAMES[value.dtype], shape=value.shape, chunks=1)


def _tensor(value: Value, name: str) -> Tensor:
    tensor = value.load()
    if not isinstance(tensor, Tensor) or tensor.dtype != value.dtype or tuple(tensor.shape) != value.shape:
        raise CheckpointError(f"{name} does not have the dtype and shape of its metadata")
    return tensor


def _step(found: _Sorted) -> tuple[int, bool]:
    """Optimizer steps done, by the optimizer's own count, and whether that is a guess."""
    counted = [value for (_, own_key), value in found.optimizer_state.items() if own_key == "step"]
    named = [value for key, value in found.others.items() if key[-1] in _STEPS]
    named += [weights[key] for weights in found.weights.values() for key in _STEPS if key in weights]
    for value in [*counted[:1], *named]:
        loaded = value.load()
        number = loaded.item() if isinstance(loaded, Tensor) and loaded.numel() == 1 else loaded
        if isinstance(number, int | float) and number >= 0 and number == int(number):
            return int(number), False
    return 0, True


def _param_groups(groups: Mapping[str | int, Mapping[str, Value]]) -> list[dict[str, object]]:
    """Hyper-parameters by group. The flattened form repeats them for each parameter: equal ones are one group."""
    unique: dict[str, dict[str, object]] = {}
    for place, values in groups.items():
        plain = hyperparameters({key: value.load() for key, value in values.items()})
        text = json.dumps(plain)
        unique.setdefault(text if isinstance(place, str) else f"{place} {text}", plain)
    return list(unique.values())


def _notices(
    optimizer: str, optimizer_state: Mapping[tuple[str, str], Value], guessed: bool, left_out: Iterable[str]
) -> Iterator[str]:
    names = ", ".join(sorted({own_key for _, own_key in optimizer_state}))
    if optimizer:
        yield f"by its state ({names}), the optimizer is assumed to be {optimizer}"
    elif optimizer_state:
        yield f"its optimizer is not known by its state ({names}): a run that resumes starts with a new optimizer state"
    else:
        yield "it has no optimizer state: a run that resumes starts with a new one"
    if guessed:
        yield "its step is not known: step 0"
    if rest := sorted(left_out):
        yield f"left out: {', '.join(rest[:5])}{f' and {len(rest) - 5} more' if len(rest) > 5 else ''}"
