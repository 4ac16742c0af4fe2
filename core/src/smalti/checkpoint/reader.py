"""Loading: into tensors that are there already, whatever number of ranks and whatever backend wrote the checkpoint.

torch's distributed-checkpoint planner and safetensors reader find which stored chunks cover what this rank holds. They do not
know a `FlatRange`: that is read here. Names, shapes and types are compared before any tensor is touched.
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
from smalti.checkpoint.format.statefile import read_state
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.planning import memory
from smalti.checkpoint.snapshot import Snapshot
from smalti.errors import CheckpointError
from smalti.parallel import (
    Communicator,
    FlatRange,
    PortableState,
    RankError,
    named_state,
    regrouped,
    run_on_all_ranks,
    shape_of,
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What came out of a checkpoint besides the tensors.

    `trainer` is what the trainer had given to the snapshot, `optimizer` the class of the optimizer that was saved. `moments`
    and `ema` tell whether those were filled in; where not, `notices` says why, in sentences for the user.
    """

    trainer: dict[str, object]
    optimizer: str
    manifest: Manifest
    moments: bool
    ema: bool
    notices: tuple[str, ...]


def load(path: Path, snapshot: Snapshot, parallel: Communicator, *, verified: bool = False) -> Loaded:
    """Fill `snapshot` from the checkpoint at `path`, a directory that all ranks see. *Collective*.

    The tensors of the model and of `ema` are filled in place and must match by name and shape; types may only widen.
    Moments are filled in place where the snapshot has them and made like their parameter where it has not, so a fresh
    optimizer needs none, and there are none after loading what was saved before the first step. `settings` is replaced, but
    hyper-parameters stay where the checkpoint has another number of parameter groups. With another optimizer than the one
    that was saved, moments and settings are left alone.

    All contents are checked by digest first, each rank reading its share; `verified` says that the caller has just done so.
    Raises CheckpointError on all ranks when the checkpoint is damaged or made for something else.
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
    moments: dict[str, dict[str, Tensor]] = {}
    if same and stored["optimizer"]:
        moments = _allocated_state(target, stored["optimizer"])
        wanted["optimizer"] = named_state(moments)
    elif not same:
        notices.append(
            f"the optimizer starts afresh: the checkpoint holds the state of {state.optimizer or 'no optimizer'}, "
            f"this run uses {target.optimizer or 'none'}"
        )

    if same and not stored["optimizer"] and manifest.step > 0 and state.optimizer in STATEFUL_OPTIMIZERS:
        notices.append(f"the checkpoint has no moments of {state.optimizer}: they start afresh")

    if stored["ema"] and snapshot.ema is not None:
        wanted["ema"] = snapshot.ema
    elif stored["ema"]:
        notices.append("the checkpoint has averaged weights (EMA), which this run does not use")
    elif snapshot.ema is not None:
        notices.append("the checkpoint has no averaged weights (EMA)")

    for group, tensors in wanted.items():
        compare(group, tensors, stored[group], state.trainer)
    if same:
        _compare_settings(state.settings, target.param_groups)
    for group, tensors in wanted.items():
        _fill(path / group, tensors)
    if same:
        target.optimizer_state, target.param_groups = moments, regrouped(state.settings, target.param_groups)
    return Loaded(
        trainer=dict(state.trainer),
        optimizer=state.optimizer,
        manifest=manifest,
        moments=same,
        ema="ema" in wanted,
        notices=tuple(notices),
    )


def _allocated_state(target: PortableState, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, Tensor]]:
    """The target's moments, and new ones for those that only the checkpoint has.

    A moment with the shape of its parameter has the room that the target makes for it, or is made like the parameter: same
    device, same sharding. Others (step counts, factored
    moments) are plain tensors, scalars on the CPU.
    """
    moments = {name: dict(found) for name, found in target.optimizer_state.items()}
    for key, tensor in stored.items():
        name, _, moment = key.rpartition(".")
        parameter = target.model.get(name)
        if parameter is None or moment in moments.get(name, {}):
            continue
        dtype = DTYPES[tensor.dtype]
        if tensor.shape == shape_of(parameter) and tensor.shape != ():
            new = target.allocate(name, moment, dtype) if target.allocate else _new_like(parameter, dtype)
        else:
            new = torch.empty(tensor.shape, dtype=dtype, device=parameter.device if tensor.shape else "cpu")
        moments.setdefault(name, {})[moment] = new
    return moments


def compare(
    group: str, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], trainer: Mapping[str, object]
) -> None:
    """Whether the tensors of a group, on any device, can be filled from those of a checkpoint with these words of the trainer.

    Raises CheckpointError, which says everything that does not fit at once, and which options decide about it.
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
        if not _widens(DTYPES[stored[name].dtype], tensors[name].dtype)
    ]
    complaints = (
        ("missing in the checkpoint", sorted(tensors.keys() - stored.keys())),
        ("unknown to this run", sorted(stored.keys() - tensors.keys())),
        ("of another shape", shapes),
        ("of a type that would lose precision", types),
    )
    told = [f"{len(found)} {what} ({_some(found)})" for what, found in complaints if found]
    if told:
        shaped_by = "--lora_rank and --lora_targets" if trainer.get("adapter") else "the options that shape the model"
        raise CheckpointError(
            f"it was made for something else; of the {group} tensors, {'; '.join(told)}",
            fix=f"give {shaped_by} as the run had them, or start afresh in a new --output_dir",
        )


def _compare_settings(saved: Sequence[Mapping[str, object]], own: Sequence[Mapping[str, object]]) -> None:
    """Raises CheckpointError for a saved hyper-parameter that is of another kind than the optimizer's own."""
    for number, (there, here) in enumerate(zip(saved, own, strict=False)):
        for key in sorted(there.keys() & here.keys()):
            if _kind(there[key]) != _kind(here[key]) and None not in (there[key], here[key]):
                told = f"optimizer.settings[{number}].{key} is {there[key]!r}, where the optimizer has {here[key]!r}"
                raise CheckpointError(f"{STATE} is malformed: {told}", fix="choose another checkpoint")


def _kind(value: object) -> type:
    """Numbers are of one kind, switches among them."""
    return float if isinstance(value, int | float) else list if isinstance(value, list | tuple) else type(value)


def _new_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, FlatRange):
        return FlatRange.empty(len(tensor), tensor.whole, tensor.begin, dtype)
    return torch.empty_like(tensor.detach(), dtype=dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _widens(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if stored == wanted:
        return True
    return stored.is_floating_point and wanted.is_floating_point and torch.promote_types(stored, wanted) == wanted


def _fill(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    spans = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FlatRange)}
    if spans:
        _fill_spans(TensorFiles(sorted(directory.glob("*.safetensors"))), spans)
    others = {name: tensor for name, tensor in tensors.items() if name not in spans}
    if others:
        _fill_tensors(directory, others)


def _fill_spans(files: TensorFiles, spans: Mapping[str, FlatRange]) -> None:
    for name, span in spans.items():
        dtype = DTYPES[files.tensors[name].dtype]
        read = span if span.dtype == dtype else torch.empty(len(span), dtype=dtype)
        files.read_into(memory(read), name, span.begin)
        if read is not span:
            span.copy_(read)


def _fill_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    reader = HuggingFaceStorageReader(str(directory))
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
