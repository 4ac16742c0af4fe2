"""Loads a checkpoint into existing tensors, with any number of ranks and any backend, whichever wrote it.

torch's distributed-checkpoint planner and safetensors reader find which stored chunks cover what this rank holds. They do not
support a `FlatRange`: that is read here. Names, shapes and types are compared before any tensor is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from smalti.checkpoint.dtypes import DTYPES
from smalti.checkpoint.format.content_validation import STATEFUL_OPTIMIZERS
from smalti.checkpoint.format.manifest import GROUPS, STATE, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import StoredTensor, stored_tensors
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.state_file import read_state
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.planning import memory
from smalti.checkpoint.snapshot import Snapshot
from smalti.errors import CheckpointError
from smalti.parallel import (
    Communicator,
    FlatRange,
    PortableState,
    RankError,
    local_part,
    named_state,
    regrouped,
    run_on_all_ranks,
    shape_of,
)

_NEVER_NEGATIVE = ("step", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The contents of a checkpoint except its tensors.

    `trainer` is the trainer's state, `optimizer` the class of the saved optimizer. `optimizer_state` and `ema`: whether those
    were loaded; if not, `notices` says why, for the user.
    """

    trainer: dict[str, object]
    optimizer: str
    manifest: Manifest
    optimizer_state: bool
    ema: bool
    notices: tuple[str, ...]


def load(path: Path, snapshot: Snapshot, parallel: Communicator, *, verified: bool = False) -> Loaded:
    """Fill `snapshot` from the checkpoint at `path`, a directory that all ranks see. *Collective*.

    The tensors of the model and of `ema` are filled in place and must match by name and shape; types may only widen,
    but for weights in bf16, to which those of fp32 are rounded with a notice.
    Optimizer state is filled in place where the snapshot has it, and else allocated like its parameter: a new optimizer has
    none, and neither has a checkpoint from before the first step. `param_groups` is replaced, but
    hyper-parameters stay where the checkpoint has another number of parameter groups. With another optimizer than the one
    that was saved, optimizer state and hyper-parameters are not changed.

    All contents are verified by digest first, each rank reading its share; `verified` skips that, if the caller has just done
    it. Raises CheckpointError on all ranks if the checkpoint is damaged or does not fit the run.
    """
    rank, ranks = parallel.world.rank, parallel.world.size

    def check() -> str:
        if not verified and (problems := verify(path, rank=rank, ranks=ranks).problems):
            raise CheckpointError("; ".join(problems[:3]))
        return ""

    loaded: list[Loaded] = []

    def read() -> str:
        loaded.append(_load(path, snapshot))
        return ""

    try:
        run_on_all_ranks(parallel, check)
        run_on_all_ranks(parallel, read)
    except RankError as failure:
        raise CheckpointError(f"{path} cannot be used: {failure}", fix=failure.fix) from failure
    return loaded[0]


def _load(path: Path, snapshot: Snapshot) -> Loaded:
    manifest, state = read_manifest(path), read_state(path / STATE)
    target, notices = snapshot.state, []
    stored = {group: stored_tensors(path / group) for group in GROUPS}
    wanted: dict[str, Mapping[str, Tensor]] = {"model": target.model}

    same = state.optimizer == target.optimizer
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    if same and stored["optimizer"]:
        optimizer_state = _allocated_state(target, stored["optimizer"])
        wanted["optimizer"] = named_state(optimizer_state)
    elif not same:
        notices.append(
            f"the optimizer starts with an empty state: the checkpoint has the state of {state.optimizer or 'no optimizer'}, "
            f"this run uses {target.optimizer or 'none'}"
        )

    if same and not stored["optimizer"] and manifest.step > 0 and state.optimizer in STATEFUL_OPTIMIZERS:
        notices.append(f"the checkpoint has no optimizer state of {state.optimizer}: it starts empty")

    if stored["ema"] and snapshot.ema is not None:
        wanted["ema"] = snapshot.ema
    elif stored["ema"]:
        notices.append("the checkpoint has EMA weights, which this run does not use")
    elif snapshot.ema is not None:
        notices.append("the checkpoint has no EMA weights")

    for group, tensors in wanted.items():
        compare(group, tensors, stored[group], state.trainer)
    types = [(stored["model"][name].dtype, tensor.dtype) for name, tensor in target.model.items()]
    if rounded := types.count(("F32", torch.bfloat16)):
        notices.append(f"{rounded} weights of the checkpoint are in fp32, and were rounded to bf16 as this run keeps them")
    if same:
        _compare_param_groups(state.param_groups, target.param_groups)
    for group, tensors in wanted.items():
        _fill(path / group, tensors)
    _check_signs(wanted.get("optimizer", {}))
    if same:
        target.optimizer_state, target.param_groups = optimizer_state, regrouped(state.param_groups, target.param_groups)
    return Loaded(
        trainer=dict(state.trainer),
        optimizer=state.optimizer,
        manifest=manifest,
        optimizer_state=same,
        ema="ema" in wanted,
        notices=tuple(notices),
    )


def _allocated_state(target: PortableState, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, Tensor]]:
    """Returns the target's optimizer state, with new tensors for those that only the checkpoint has.

    A tensor with the shape of its parameter is allocated by the target, or else like the parameter: same device, same sharding.
    Others (step counts, factored second moments) are plain tensors, scalars on the CPU.
    """
    optimizer_state = {name: dict(found) for name, found in target.optimizer_state.items()}
    for key, tensor in stored.items():
        name, _, own_key = key.rpartition(".")
        parameter = target.model.get(name)
        if parameter is None or own_key in optimizer_state.get(name, {}):
            continue
        dtype = DTYPES[tensor.dtype]
        if tensor.shape == shape_of(parameter) and tensor.shape != ():
            new = target.allocate(name, own_key, dtype) if target.allocate else _new_like(parameter, dtype)
        else:
            new = torch.empty(tensor.shape, dtype=dtype, device=parameter.device if tensor.shape else "cpu")
        optimizer_state.setdefault(name, {})[own_key] = new
    return optimizer_state


def compare(
    group: str, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], trainer: Mapping[str, object]
) -> None:
    """Check that the tensors of a group, on any device, can be loaded from those of a checkpoint with this trainer state.

    Raises CheckpointError, which lists everything that does not fit, and the options that determine it.
    """
    both = sorted(tensors.keys() & stored.keys())
    shapes = [
        f"{name} {list(stored[name].shape)} for {list(shape_of(tensors[name]))}"
        for name in both
        if stored[name].shape != shape_of(tensors[name])
    ]
    types = [
        f"{name} {stored[name].dtype} for {tensors[name].dtype}"
        for name in both
        if not _fits(DTYPES[stored[name].dtype], tensors[name].dtype)
    ]
    categories = (
        ("missing from the checkpoint", sorted(tensors.keys() - stored.keys())),
        ("unknown to this run", sorted(stored.keys() - tensors.keys())),
        ("of another shape", shapes),
        ("of a type that would lose precision", types),
    )
    if problems := [f"{len(found)} {what} ({_some(found)})" for what, found in categories if found]:
        shaped_by = (
            "the options of the adapter (smalti train --help lora)" if trainer.get("adapter") else "the options of the model"
        )
        raise CheckpointError(
            f"it does not fit this run; of the {group} tensors, {'; '.join(problems)}",
            fix=f"set {shaped_by} as in the run that saved it, or start a new run in another --output_dir",
        )


def _compare_param_groups(saved: Sequence[Mapping[str, object]], current: Sequence[Mapping[str, object]]) -> None:
    """Raises CheckpointError for a saved group without any, and for one of another type than the optimizer's own."""
    if not all(saved):
        raise CheckpointError("the optimizer state has no settings", fix="resume from another one")
    for number, (saved_group, current_group) in enumerate(zip(saved, current, strict=False)):
        for key in sorted(saved_group.keys() & current_group.keys()):
            if _kind(saved_group[key]) != _kind(current_group[key]) and None not in (saved_group[key], current_group[key]):
                found, expected = saved_group[key], current_group[key]
                problem = f"optimizer.settings[{number}].{key} is {found!r}, where the optimizer has {expected!r}"
                raise CheckpointError(f"{STATE} is malformed: {problem}", fix="choose another checkpoint")


def _check_signs(state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for a count or a mean of squares that is negative in this rank's part of it."""
    for full_name, tensor in state.items():
        name, _, key = full_name.rpartition(".")
        part = local_part(tensor)
        if key in _NEVER_NEGATIVE and type(part) in (Tensor, FlatRange) and part.numel() and part.min() < 0:
            raise CheckpointError(f"{key} of {name} in the optimizer state is negative", fix="resume from another one")


def _kind(value: object) -> type:
    """Numbers and booleans are one kind."""
    return float if isinstance(value, int | float) else list if isinstance(value, list | tuple) else type(value)


def _new_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, FlatRange):
        return FlatRange.empty(len(tensor), tensor.whole, tensor.begin, dtype)
    return torch.empty_like(tensor.detach(), dtype=dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if stored == wanted or (stored, wanted) == (torch.float32, torch.bfloat16):
        return True
    return stored.is_floating_point and wanted.is_floating_point and torch.promote_types(stored, wanted) == wanted


def _fill(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    if spans := {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FlatRange)}:
        _fill_spans(TensorFiles(sorted(directory.glob("*.safetensors"))), spans)
    if others := {name: tensor for name, tensor in tensors.items() if name not in spans}:
        _fill_tensors(directory, others)


def _fill_spans(files: TensorFiles, spans: Mapping[str, FlatRange]) -> None:
    for name, span in spans.items():
        dtype = DTYPES[files.tensors[name].dtype]
        read = span if span.dtype == dtype else torch.empty(len(span), dtype=dtype)
        files.read_into(memory(read), name, span.begin * read.itemsize)
        if read is not span:
            span.copy_(read)


def _fill_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    reader = HuggingFaceStorageReader(str(directory))
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
