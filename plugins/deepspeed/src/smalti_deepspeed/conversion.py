"""Checkpoints that DeepSpeed has written, by itself or through Accelerate, opened for conversion. Used in a process of its own.

    latest                                                   the name of the folder below
    global_step100/mp_rank_00_model_states.pt                ZeRO 1 and 2: the model as it computes, names and shapes
    global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt ZeRO 3: the same for each rank, without weights
    global_step100/*zero_pp_rank_0_mp_rank_00_optim_states.pt each rank's part of fp32 weights and moments

All are pickles. They are read by torch's loader for weights alone, which admits tensors and plain values; three classes of
DeepSpeed's that occur in every file become empty shells. Tensors are mapped from the files and put together one at a time.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from smalti import CheckpointError
from smalti.checkpoint import NAMES, Contents, StoredTensor, guess_optimizer, memory
from smalti.parallel import portable_name

_NOT_SETTINGS = frozenset(("params", "param_names", "foreach", "fused", "capturable", "differentiable", "name"))
"""Which parameters a group has, and switches between implementations of the same mathematics."""
_NAME = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


class Shell:
    """Stands for an object of DeepSpeed's. It has the attributes that were saved; nothing of the class is run."""

    def __init__(self, *values: object) -> None:
        self.values = values


_SHELLS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def open_deepspeed(folder: Path) -> ZeroCheckpoint:
    """The checkpoint in a folder of DeepSpeed's, or the newest of those below it."""
    inner = _inner(folder)
    try:
        return ZeroCheckpoint(inner)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{inner} is not built like a checkpoint of ZeRO 1, 2 or 3: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor of the checkpoint, not put together yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class ZeroCheckpoint:
    """A checkpoint of ZeRO 1, 2 or 3. Raises CheckpointError for one that is not whole, or of another kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ranks = [_load(path)["optimizer_state_dict"] for path in _of_ranks(folder)]
        third = "fp32_flat_groups" in ranks[0]
        models = [_load(path) for path in _models(folder, len(ranks) if third else 1)]
        said = ranks[0].get("partition_count", len(ranks))
        count = said if isinstance(said, int) else max(said)
        if count != len(ranks):
            raise CheckpointError(f"{folder} has the files of {len(ranks)} ranks, and says that there were {count}")
        if not third and _dealt_in_turn(models[0].get("ds_config")):
            message = "it was trained with round_robin_gradients, with which DeepSpeed notes wrong places for its weights"
            raise CheckpointError(f"{folder} cannot be read: {message}", fix="let DeepSpeed load it, and save without")
        if len(steps := {int(model.get("global_steps", 0)) for model in models}) > 1:
            raise CheckpointError(f"{folder} is mixed: its ranks are of steps {', '.join(map(str, sorted(steps)))}")
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
        cut = _third(ranks, shapes) if third else _first_two(ranks, shapes)
        frozen = _frozen(models) if models[0].get("frozen_param_shapes") else {}
        whole = _whole(models[0], models[0].get("buffer_names", ()) if third else models[0]["module"])
        self._tensors = {
            **{f"model/{name}": each for name, each in {**whole, **frozen, **cut.weights}.items()},
            **{f"optimizer/{name}": each for name, each in cut.moments.items()},
        }
        optimizer = guess_optimizer({name.rpartition(".")[2] for name in cut.moments})
        self.contents = Contents(
            tensors={name: _stored(name, each) for name, each in self._tensors.items()},
            step=steps.pop(),
            optimizer=optimizer,
            settings=[_plain(group) for group in cut.groups],
            notices=tuple(_notices(optimizer, cut, frozen)),
        )

    def read(self, name: str) -> list[memoryview]:
        return [memory(self._tensors[name].load())]


# --- what the ranks have cut ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """fp32 weights by name, moments by "NAME.MOMENT", hyper-parameters by group."""

    weights: dict[str, _Tensor]
    moments: dict[str, _Tensor]
    groups: Sequence[Mapping[str, object]]
    unread: bool = False
    """Whether the optimizer's state is there in a form that is not read."""


def _first_two(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Cut:
    """Stages 1 and 2: each rank tells which elements of its flat tensors belong to which parameter."""
    if "param_slice_mappings" not in ranks[0]:
        raise CheckpointError("it does not tell where parameters lie in it; DeepSpeed 0.8 and later do")
    weights: dict[str, _Tensor] = {}
    moments: dict[str, _Tensor] = {}
    states: list[Any] = [each.get("base_optimizer_state") for each in ranks]
    known = all(isinstance(state, Mapping) and "state" in state for state in states)  # "elastic" ones have another form
    for number, group in enumerate(shapes):
        flats = [each["single_partition_of_fp32_groups"][number] for each in ranks]
        kept = [state["state"].get(number, {}) for state in states] if known else []
        places = [each["param_slice_mappings"][number] for each in ranks]
        for name, shape in group.items():
            spans = [
                (places[rank][name].start, places[rank][name].numel) if name in places[rank] else (0, 0)
                for rank in range(len(ranks))
            ]
            weights[portable_name(name)] = _joined(flats, spans, shape)
            moments |= _moments(portable_name(name), kept, spans, shape)
    groups = states[0]["param_groups"] if known else []
    return _Cut(weights=weights, moments=moments, groups=groups, unread=not known and any(states))


def _third(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Cut:
    """Stage 3: each rank has an equal part of every parameter, one after the other through all its flat tensors."""
    weights: dict[str, _Tensor] = {}
    moments: dict[str, _Tensor] = {}
    states = [each["optimizer_state_dict"] for each in ranks]
    flats = [each["fp32_flat_groups"] for each in ranks]
    ends = [sum(flat.numel() for flat in flats[0][: number + 1]) for number in range(len(flats[0]))]
    position = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        size = math.prod(shape)
        part = -(-size // len(ranks))
        number = next((number for number, end in enumerate(ends) if position < end), len(ends) - 1)
        offset = position - (ends[number] - flats[0][number].numel())
        spans = [(offset, max(0, min(part, size - rank * part))) for rank in range(len(ranks))]
        weights[portable_name(name)] = _joined([each[number] for each in flats], spans, shape)
        moments |= _moments(portable_name(name), [state["state"].get(number, {}) for state in states], spans, shape)
        position += part
    return _Cut(weights=weights, moments=moments, groups=states[0]["param_groups"])


def _moments(
    name: str, states: Sequence[Mapping[str, Any]], spans: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> dict[str, _Tensor]:
    """The moments of a parameter, given what each rank keeps beside the flat tensor in which it lies."""
    found: dict[str, _Tensor] = {}
    for key, value in (states[0] if states else {}).items():
        if isinstance(value, Tensor) and value.ndim == 1:
            found[f"{name}.{key}"] = _joined([state[key] for state in states], spans, shape)
        elif isinstance(value, Tensor | int | float):
            if any(float(state[key]) != float(value) for state in states):
                raise CheckpointError(f"it is mixed: its ranks do not agree about {key} of {name}")
            found[f"{name}.{key}"] = _as_it_is(torch.tensor(float(value)))
    return found


def _joined(flats: Sequence[Tensor], spans: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> _Tensor:
    """A tensor out of the ranks' spans (start, length) in their flat tensors."""
    if sum(length for _, length in spans) != math.prod(shape) or any(
        start + length > flat.numel() for flat, (start, length) in zip(flats, spans, strict=True)
    ):
        raise CheckpointError(f"the parts of a tensor of shape {list(shape)} do not fill it")

    def load() -> Tensor:
        parts = [flat[start : start + length] for flat, (start, length) in zip(flats, spans, strict=True)]
        return torch.cat(parts).view(shape)

    return _Tensor(dtype=flats[0].dtype, shape=shape, load=load)


def _dealt_in_turn(settings: object) -> bool:
    """Whether DeepSpeed gave parameters to the ranks in turn; it notes their places as if it had not."""
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


# --- what is not cut, or not by the optimizer -----------------------------------------------------------------------


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, _Tensor]:
    """What does not train: whole under stages 1 and 2, in equal parts under stage 3."""
    found: dict[str, _Tensor] = {}
    for name, shape in models[0]["frozen_param_shapes"].items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        left = math.prod(shape)
        spans = []
        for part in parts:
            spans.append((0, min(part.numel(), left)))
            left -= spans[-1][1]
        found[portable_name(name)] = _joined(parts, spans, tuple(shape))
    return found


def _whole(model: Mapping[str, Any], names: Iterable[str]) -> dict[str, _Tensor]:
    """Those of these tensors that every rank has whole, under their first names: buffers, and what stage 1 does not cut."""
    found: dict[str, _Tensor] = {}
    for name in names:
        tensor = model["module"].get(name)
        if isinstance(tensor, Tensor) and name not in model.get("shared_params", {}):
            found[portable_name(name)] = _as_it_is(tensor)
    return found


def _as_it_is(tensor: Tensor) -> _Tensor:
    return _Tensor(dtype=tensor.dtype, shape=tuple(tensor.shape), load=lambda: tensor)


# --- files ----------------------------------------------------------------------------------------------------------


def _inner(folder: Path) -> Path:
    """The folder that holds the files: this one, the one that `latest` names, or the only one."""
    if any(folder.glob("*_optim_states.pt")):
        return folder
    found = sorted({path.parent for path in folder.glob("*/*_optim_states.pt")})
    latest = folder / "latest"
    if found and latest.is_file():
        named = folder / latest.read_text(encoding="utf-8").strip()
        if named not in found:
            there = ", ".join(path.name for path in found)
            message = f"{latest} names {named.name}, which is not whole or not there; there is {there}"
            raise CheckpointError(message, fix="name one of these folders, if it is the one you mean")
        return named
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{folder} has no *_optim_states.pt, in which DeepSpeed keeps the fp32 weights")
    names = ", ".join(path.name for path in found)
    raise CheckpointError(f"{folder} holds several checkpoints, {names}", fix="name one of these folders")


def _of_ranks(folder: Path) -> list[Path]:
    """The files with the ranks' parts, in the order of ranks."""
    found: dict[int, Path] = {}
    for path in folder.glob("*_optim_states.pt"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(f"{path} belongs to tensor or expert parallelism, which is not read")
        found[int(match[1])] = path
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} lacks the files of some ranks; there are those of {sorted(found)}")
    return [found[rank] for rank in sorted(found)]


def _models(folder: Path, ranks: int) -> list[Path]:
    several = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    paths = [folder / "mp_rank_00_model_states.pt"] if ranks == 1 and not several[0].is_file() else several
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
    return paths


def _load(path: Path) -> Mapping[str, Any]:
    """What `torch.save` wrote, if it is tensors, plain values and shells. Raises CheckpointError for anything else."""
    _check_bytes(path)
    try:
        with torch.serialization.safe_globals([(Shell, name) for name in _SHELLS]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "unsupported" in line.lower()), lines[0])
        raise CheckpointError(f"{path} is damaged, or holds more than tensors and plain values: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} does not hold what DeepSpeed writes")
    return loaded


def _check_bytes(path: Path) -> None:
    """Raises CheckpointError where contents do not match the checksums in the file, or are another rank's.

    torch does not look at either. Nothing that DeepSpeed puts into a file tells whose it is; but torch puts all of it into a
    folder of the name under which it was saved.
    """
    if not is_zipfile(path):
        return  # torch says what else it may be
    try:
        with ZipFile(path) as archive:
            damaged = archive.testzip()
            folder = next(iter(archive.namelist()), "").partition("/")[0]
    except (BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it does not match its checksum")
    named, saved = _RANK.search(path.name), _RANK.search(folder)
    if named and saved and named.groups() != saved.groups():
        fix = "put the files of all ranks back under the names that they were saved under"
        raise CheckpointError(f"{path} is the file of another rank: it was saved as {folder}.pt", fix=fix)


# --- what is reported of it ---------------------------------------------------------------------------------------------


def _stored(name: str, tensor: _Tensor) -> StoredTensor:
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} is of type {tensor.dtype}, which a checkpoint cannot hold")
    return StoredTensor(dtype=NAMES[tensor.dtype], shape=tensor.shape, chunks=1)


def _plain(group: Mapping[str, object]) -> dict[str, object]:
    return {key: _as_json(value) for key, value in sorted(group.items()) if key not in _NOT_SETTINGS}


def _as_json(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case list() | tuple():
            return [_as_json(item) for item in value]
    return str(value)


def _notices(optimizer: str, cut: _Cut, frozen: Mapping[str, object]) -> Iterator[str]:
    names = ", ".join(sorted({name.rpartition(".")[2] for name in cut.moments}))
    if optimizer:
        yield f"by its moments ({names}), the optimizer is taken for {optimizer}"
    elif cut.moments:
        yield f"its moments ({names}) do not tell which optimizer it is: a run that resumes starts its own afresh"
    elif cut.unread:
        yield "the state of its optimizer is in the form of elastic_checkpoint, which is not read: a run starts its own afresh"
    else:
        yield "it holds no state of an optimizer: a run that resumes starts its own afresh"
    if frozen:
        yield f"{len(frozen)} of the weights did not train"
