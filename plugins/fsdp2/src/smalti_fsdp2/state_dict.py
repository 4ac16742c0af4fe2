"""Saved dictionaries of a model and its optimizer, in the forms that torch gives them, as the contents of a checkpoint.

The optimizer's is found by its `param_groups`, at the top or below any key, nested ("state" > PARAMETER > MOMENT) or flattened
("state.PARAMETER.MOMENT"). The model's is the one that has the parameters which the optimizer steps, or is called like one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from smalti import CheckpointError
from smalti.checkpoint import NAMES, Contents, StoredTensor, guess_optimizer, memory
from smalti.parallel import portable_name
from smalti_fsdp2.dcp_metadata import Key

_MODELS = frozenset(("model", "module", "state_dict", "model_state_dict", "net", "network", "transformer", "unet"))
_GROUPS, _STATE, _STEPS = "param_groups", "state", ("step", "global_step")
_NOT_SETTINGS = frozenset(("params", "param_names", "foreach", "fused", "capturable", "differentiable"))
"""Which parameters a group has, and switches between implementations of the same mathematics."""


class Value(Protocol):
    """Something that was saved. `dtype` and `shape` are None for what is no tensor."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def shape(self) -> tuple[int, ...] | None: ...

    def load(self) -> object:
        """The tensor, whole and on the CPU, or the plain value."""
        ...


@dataclass(kw_only=True)
class _Sorted:
    """Values by their part in a checkpoint. `moments` is by parameter and moment, `groups` by parameter or number, and key."""

    weights: dict[Key, dict[str, Value]] = field(default_factory=dict)
    moments: dict[tuple[str, str], Value] = field(default_factory=dict)
    groups: dict[str | int, dict[str, Value]] = field(default_factory=dict)
    others: dict[Key, Value] = field(default_factory=dict)


class StateDicts:
    """The checkpoint that some saved values make up, by where they stand in the dictionaries that were saved.

    Raises CheckpointError when it cannot be told which of them are the weights.
    """

    def __init__(self, folder: Path, values: Mapping[Key, Value]) -> None:
        found = _sort(folder, values)
        weights = found.weights.pop(_model_key(folder, found))
        named = {f"model/{portable_name(name)}": value for name, value in weights.items()}
        moments = {(portable_name(name), moment): value for (name, moment), value in found.moments.items()}
        named |= {f"optimizer/{name}.{moment}": value for (name, moment), value in moments.items()}
        self._values = named
        optimizer = guess_optimizer({moment for _, moment in moments})
        left_out = [".".join(map(str, key)) for key in found.others if key[-1] not in _STEPS]
        left_out += [".".join(map(str, key)) or "the top" for key in found.weights]
        step, guessed = _step(found)
        self.contents = Contents(
            tensors={name: _stored(name, value) for name, value in named.items()},
            step=step,
            optimizer=optimizer,
            settings=_settings(found.groups),
            notices=tuple(_notices(optimizer, moments, guessed, left_out)),
        )

    def read(self, name: str) -> list[memoryview]:
        return [memory(_tensor(self._values[name], name))]


def _sort(folder: Path, values: Mapping[Key, Value]) -> _Sorted:
    found = _Sorted()
    optimizers = {at for key in values if (at := _before_groups(key)) is not None}
    if len(optimizers) > 1:
        names = " and ".join(sorted(".".join(map(str, at)) for at in optimizers))
        raise CheckpointError(f"{folder} holds several optimizers, {names}; a checkpoint of smalti has one")
    for key, value in values.items():
        inside = next((key[len(at) :] for at in optimizers if key[: len(at)] == at), ())
        if (place := _group_place(inside)) is not None:
            found.groups.setdefault(place[0], {})[place[1]] = value
        elif value.shape is not None and (moment := _moment_place(inside)) is not None:
            found.moments[moment] = value
        elif value.shape is not None and isinstance(key[-1], str):
            found.weights.setdefault(key[:-1], {})[key[-1]] = value
        else:
            found.others[key] = value
    return found


def _before_groups(key: Key) -> Key | None:
    """Where the optimizer's dictionary stands, if this key is one of its parameter groups."""
    return next((key[:n] for n, word in enumerate(key) if str(word).partition(".")[0] == _GROUPS), None)


def _group_place(inside: Key) -> tuple[str | int, str] | None:
    """(0, "lr") or ("blocks.0.weight", "lr"), given where in the optimizer's dictionary something stands."""
    match inside:
        case (word, int(number), str(setting)) if word == _GROUPS:
            return number, setting
        case (str(word),) if word.startswith(f"{_GROUPS}."):
            name, _, setting = word.removeprefix(f"{_GROUPS}.").rpartition(".")
            return name, setting
    return None


def _moment_place(inside: Key) -> tuple[str, str] | None:
    """("blocks.0.weight", "exp_avg"), given where in the optimizer's dictionary something stands."""
    match inside:
        case (word, str(name), str(moment)) if word == _STATE:
            return name, moment
        case (str(word),) if word.startswith(f"{_STATE}."):
            name, _, moment = word.removeprefix(f"{_STATE}.").rpartition(".")
            return (name, moment) if name else None
    return None


def _model_key(folder: Path, found: _Sorted) -> Key:
    """Where the model's dictionary stands."""
    stepped = {name for name, _ in found.moments}
    named = [key for key in found.weights if not key or key[-1] in _MODELS]
    fitting = [key for key, weights in found.weights.items() if stepped and stepped <= weights.keys()]
    for candidates in (fitting, named, list(found.weights)):
        if len(candidates) == 1:
            return candidates[0]
    if not found.weights:
        raise CheckpointError(f"{folder} has no weights", fix="use the folder that contains them")
    places = ", ".join(sorted(".".join(map(str, key)) or "the top" for key in found.weights))
    raise CheckpointError(f"{folder} holds several dictionaries of tensors, {places}, and none of them is plainly the model's")


def _stored(name: str, value: Value) -> StoredTensor:
    if value.dtype is None or value.shape is None or value.dtype not in NAMES:
        raise CheckpointError(f"{name} is of type {value.dtype}, which a checkpoint cannot hold")
    return StoredTensor(dtype=NAMES[value.dtype], shape=value.shape, chunks=1)


def _tensor(value: Value, name: str) -> Tensor:
    tensor = value.load()
    if not isinstance(tensor, Tensor) or tensor.dtype != value.dtype or tuple(tensor.shape) != value.shape:
        raise CheckpointError(f"{name} is not the tensor that it is said to be")
    return tensor


def _step(found: _Sorted) -> tuple[int, bool]:
    """Optimizer steps done, as the optimizer counted them, and whether that is a guess."""
    counted = [value for (_, moment), value in found.moments.items() if moment == "step"]
    named = [value for key, value in found.others.items() if key[-1] in _STEPS]
    named += [weights[word] for weights in found.weights.values() for word in _STEPS if word in weights]
    for value in [*counted[:1], *named]:
        loaded = value.load()
        number = loaded.item() if isinstance(loaded, Tensor) and loaded.numel() == 1 else loaded
        if isinstance(number, int | float) and number >= 0 and number == int(number):
            return int(number), False
    return 0, True


def _settings(groups: Mapping[str | int, Mapping[str, Value]]) -> list[dict[str, object]]:
    """Hyper-parameters by group. The flattened form repeats them for each parameter: equal ones are one group."""
    settings: dict[str, dict[str, object]] = {}
    for place, values in groups.items():
        plain = {key: _as_json(value.load()) for key, value in sorted(values.items()) if key not in _NOT_SETTINGS}
        text = json.dumps(plain)
        settings.setdefault(text if isinstance(place, str) else f"{place} {text}", plain)
    return list(settings.values())


def _as_json(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case list() | tuple():
            return [_as_json(item) for item in value]
    return str(value)


def _notices(optimizer: str, moments: Mapping[tuple[str, str], Value], guessed: bool, left_out: Iterable[str]) -> Iterator[str]:
    names = ", ".join(sorted({moment for _, moment in moments}))
    if optimizer:
        yield f"by its moments ({names}), the optimizer is taken for {optimizer}"
    elif moments:
        yield f"its moments ({names}) do not tell which optimizer it is: a run that resumes starts its own afresh"
    else:
        yield "it holds no state of an optimizer: a run that resumes starts its own afresh"
    if guessed:
        yield "it does not tell its step: step 0"
    if rest := sorted(left_out):
        yield f"left out: {', '.join(rest[:5])}{f' and {len(rest) - 5} more' if len(rest) > 5 else ''}"
