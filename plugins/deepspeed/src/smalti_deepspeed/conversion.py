"""Opens checkpoints written by DeepSpeed, also through Accelerate, for conversion. Runs in a separate process.

    latest                                                   the name of the folder below
    global_step100/mp_rank_00_model_states.pt                ZeRO 1 and 2: the model in its compute dtype, names and shapes
    global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt ZeRO 3: the same for each rank, without weights
    global_step100/*zero_pp_rank_0_mp_rank_00_optim_states.pt each rank's part of the fp32 weights and optimizer state

All are pickles. They are read by `torch.load(weights_only=True)`, which accepts tensors and plain values. Classes of DeepSpeed
that occur in every file become placeholders. Tensors are memory-mapped and assembled one at a time.
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
from smalti.checkpoint import NAMES, Contents, StoredTensor, guess_optimizer, hyperparameters, memory
from smalti.parallel import portable_name

_NAME = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


class Placeholder:
    """Replaces an object of DeepSpeed. It has the saved attributes; no code of the class is run."""

    def __init__(self, *values: object) -> None:
        self.values = values


_PLACEHOLDERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def open_deepspeed(folder: Path) -> ZeroCheckpoint:
    """Opens the checkpoint in a folder, or the newest one below it. Raises CheckpointError."""
    inner = _inner(folder)
    try:
        return ZeroCheckpoint(inner)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{inner} does not have the structure of a checkpoint of ZeRO 1, 2 or 3: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor of the checkpoint, assembled when it is loaded."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class ZeroCheckpoint:
    """A checkpoint of ZeRO 1, 2 or 3. Raises CheckpointError for one that is incomplete, or of another kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ranks = [_load(path)["optimizer_state_dict"] for path in _of_ranks(folder)]
        stage_3 = "fp32_flat_groups" in ranks[0]
        models = [_load(path) for path in _models(folder, len(ranks) if stage_3 else 1)]
        partitions = ranks[0].get("partition_count", len(ranks))
        count = partitions if isinstance(partitions, int) else max(partitions)
        if count != len(ranks):
            raise CheckpointError(f"{folder} has files of {len(ranks)} ranks, but was saved by {count}")
        if not stage_3 and _assigned_round_robin(models[0].get("ds_config")):
            message = "it was trained with round_robin_gradients, for which DeepSpeed saves wrong offsets of the weights"
            raise CheckpointError(f"{folder} cannot be read: {message}", fix="load and save it with DeepSpeed, without that")
        if len(steps := {int(model.get("global_steps", 0)) for model in models}) > 1:
            raise CheckpointError(f"{folder} is inconsistent: its ranks are at steps {', '.join(map(str, sorted(steps)))}")
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
        parts = _read_stage_3(ranks, shapes) if stage_3 else _read_stages_1_and_2(ranks, shapes)
        frozen = _frozen(models) if models[0].get("frozen_param_shapes") else {}
        complete = _complete(models[0], models[0].get("buffer_names", ()) if stage_3 else models[0]["module"])
        self._tensors = {
            **{f"model/{name}": each for name, each in {**complete, **frozen, **parts.weights}.items()},
            **{f"optimizer/{name}": each for name, each in parts.optimizer_state.items()},
        }
        optimizer = guess_optimizer({name.rpartition(".")[2] for name in parts.optimizer_state})
        self.contents = Contents(
            tensors={name: _stored(name, each) for name, each in self._tensors.items()},
            step=steps.pop(),
            optimizer=optimizer,
            param_groups=[hyperparameters(group) for group in parts.groups],
            notices=tuple(_notices(optimizer, parts, frozen)),
        )

    def read(self, name: str) -> list[memoryview]:
        return [memory(self._tensors[name].load())]


# --- split over the ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """fp32 weights by name, optimizer state by "NAME.KEY", hyper-parameters by group."""

    weights: dict[str, _Tensor]
    optimizer_state: dict[str, _Tensor]
    groups: Sequence[Mapping[str, object]]
    unread: bool = False
    """Whether there is optimizer state in a format that is not read."""


def _read_stages_1_and_2(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Parts:
    """Stages 1 and 2: each rank has saved which elements of its flat tensors belong to which parameter."""
    if "param_slice_mappings" not in ranks[0]:
        raise CheckpointError("it has no offsets of parameters (param_slice_mappings); DeepSpeed 0.8 and later write them")
    weights: dict[str, _Tensor] = {}
    optimizer_state: dict[str, _Tensor] = {}
    states: list[Any] = [each.get("base_optimizer_state") for each in ranks]
    known = all(isinstance(state, Mapping) and "state" in state for state in states)  # elastic_checkpoint has another format
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
            optimizer_state |= _state_of(portable_name(name), kept, spans, shape)
    groups = states[0]["param_groups"] if known else []
    return _Parts(weights=weights, optimizer_state=optimizer_state, groups=groups, unread=not known and any(states))


def _read_stage_3(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Parts:
    """Stage 3: each rank has an equal part of every parameter, one after the other in its flat tensors."""
    weights: dict[str, _Tensor] = {}
    optimizer_state: dict[str, _Tensor] = {}
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
        optimizer_state |= _state_of(portable_name(name), [state["state"].get(number, {}) for state in states], spans, shape)
        position += part
    return _Parts(weights=weights, optimizer_state=optimizer_state, groups=states[0]["param_groups"])


def _state_of(
    name: str, states: Sequence[Mapping[str, Any]], spans: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> dict[str, _Tensor]:
    """The optimizer state of a parameter, from the state of the flat tensor that contains it, by rank."""
    found: dict[str, _Tensor] = {}
    for key, value in (states[0] if states else {}).items():
        if isinstance(value, Tensor) and value.ndim == 1:
            found[f"{name}.{key}"] = _joined([state[key] for state in states], spans, shape)
        elif isinstance(value, Tensor | int | float):
            if any(float(state[key]) != float(value) for state in states):
                raise CheckpointError(f"it is inconsistent: its ranks have different values of {key} of {name}")
            found[f"{name}.{key}"] = _unsplit(torch.tensor(float(value)))
    return found


def _joined(flats: Sequence[Tensor], spans: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> _Tensor:
    """A tensor made of the ranks' spans (start, length) of their flat tensors."""
    if sum(length for _, length in spans) != math.prod(shape) or any(
        start + length > flat.numel() for flat, (start, length) in zip(flats, spans, strict=True)
    ):
        raise CheckpointError(f"the parts of a tensor of shape {list(shape)} do not fill it")

    def load() -> Tensor:
        parts = [flat[start : start + length] for flat, (start, length) in zip(flats, spans, strict=True)]
        return torch.cat(parts).view(shape)

    return _Tensor(dtype=flats[0].dtype, shape=shape, load=load)


def _assigned_round_robin(settings: object) -> bool:
    """Whether DeepSpeed assigned parameters round robin; the offsets that it saves ignore that."""
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


# --- not split, or not by the optimizer --------------------------------------------------------------------------


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, _Tensor]:
    """Weights that do not train: complete under stages 1 and 2, in equal parts under stage 3."""
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


def _complete(model: Mapping[str, Any], names: Iterable[str]) -> dict[str, _Tensor]:
    """The tensors of which every rank has a complete copy, under their first names: buffers, and weights under stage 1."""
    found: dict[str, _Tensor] = {}
    for name in names:
        tensor = model["module"].get(name)
        if isinstance(tensor, Tensor) and name not in model.get("shared_params", {}):
            found[portable_name(name)] = _unsplit(tensor)
    return found


def _unsplit(tensor: Tensor) -> _Tensor:
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
            message = f"{latest} names {named.name}, which is incomplete or missing; there is {there}"
            raise CheckpointError(message, fix="use one of these folders instead")
        return named
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{folder} has no *_optim_states.pt, which contains the fp32 weights")
    names = ", ".join(path.name for path in found)
    raise CheckpointError(f"{folder} contains several checkpoints, {names}", fix="use one of these folders")


def _of_ranks(folder: Path) -> list[Path]:
    """The ranks' files of optimizer state, in rank order."""
    found: dict[int, Path] = {}
    for path in folder.glob("*_optim_states.pt"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(f"{path} belongs to tensor or expert parallelism, which is not read")
        found[int(match[1])] = path
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} lacks files of some ranks; it has those of ranks {sorted(found)}")
    return [found[rank] for rank in sorted(found)]


def _models(folder: Path, ranks: int) -> list[Path]:
    several = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    paths = [folder / "mp_rank_00_model_states.pt"] if ranks == 1 and not several[0].is_file() else several
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
    return paths


def _load(path: Path) -> Mapping[str, Any]:
    """Loads tensors, plain values and placeholders. Raises CheckpointError for anything else."""
    _check_bytes(path)
    try:
        with torch.serialization.safe_globals([(Placeholder, name) for name in _PLACEHOLDERS]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "unsupported" in line.lower()), lines[0])
        raise CheckpointError(f"{path} is damaged, or has more than tensors and plain values: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} is not a file that DeepSpeed writes")
    return loaded


def _check_bytes(path: Path) -> None:
    """Raises CheckpointError where contents do not match the checksums in the file, or are another rank's.

    torch checks neither. DeepSpeed does not save the rank in a file. The archive that torch writes contains a folder with the
    original file name.
    """
    if not is_zipfile(path):
        return  # torch reports what is wrong
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
        fix = "give the files of all ranks their original names"
        raise CheckpointError(f"{path} is the file of another rank: it was saved as {folder}.pt", fix=fix)


# --- what is reported ---------------------------------------------------------------------------------------------------


def _stored(name: str, tensor: _Tensor) -> StoredTensor:
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} is of type {tensor.dtype}, which a checkpoint cannot hold")
    return StoredTensor(dtype=NAMES[tensor.dtype], shape=tensor.shape, chunks=1)


def _notices(optimizer: str, parts: _Parts, frozen: Mapping[str, object]) -> Iterator[str]:
    names = ", ".join(sorted({name.rpartition(".")[2] for name in parts.optimizer_state}))
    if optimizer:
        yield f"by its state ({names}), the optimizer is assumed to be {optimizer}"
    elif parts.optimizer_state:
        yield f"its optimizer is not known by its state ({names}): a run that resumes starts with a new optimizer state"
    elif parts.unread:
        yield "its optimizer state has the format of elastic_checkpoint, which is not read: a run starts with a new one"
    else:
        yield "it has no optimizer state: a run that resumes starts with a new one"
    if frozen:
        yield f"{len(frozen)} of the weights did not train"
