"""A checkpoint of any strategy on any number of ranks is read by any other, bit for bit."""

import json
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smalti.checkpoint.snapshot import Snapshot
from smalti.hookspecs import HookSpecs
from smalti.training.optim.ema import Ema
from smalti_testing.strategy_subject import open_strategy, whole_tensor
from support.forked_ranks import forked_processes
from support.whole import some

SHARDED = ("--fsdp_enable", "--optimizer=adamw")
FROM_FIRST = (*SHARDED, "--fsdp_cpu_ram_efficient_loading")
HALVES = (*SHARDED, "--fsdp_shard_size=2")
VERSION1 = (*SHARDED, "--fsdp_version=1")


def zero(stage: int, *offloaded: str) -> tuple[str, ...]:
    """With all parameters cut, and torch's Adam, which DeepSpeed need not compile, for what lies in host memory."""
    offload = {f"offload_{each}": {"device": "cpu"} for each in offloaded}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    document = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **offload},
        "optimizer": optimizer,
    }
    return (f"--deepspeed_config={json.dumps(document)}",)


KINDS = {
    "single": ("ddp", (), 1),
    "ddp-2": ("ddp", (), 2),
    "fsdp-1": ("fsdp2", SHARDED, 1),
    "fsdp-2": ("fsdp2", SHARDED, 2),
    "fsdp-2-from-first": ("fsdp2", FROM_FIRST, 2),
    "fsdp-3": ("fsdp2", SHARDED, 3),
    "fsdp-4": ("fsdp2", SHARDED, 4),
    "fsdp-2x2": ("fsdp2", HALVES, 4),
    "fsdp1-2": ("fsdp2", VERSION1, 2),
    "zero1-3": ("deepspeed", zero(1), 3),
    "zero2-1": ("deepspeed", zero(2), 1),
    "zero2-2-offloaded": ("deepspeed", zero(2, "optimizer"), 2),
    "zero3-2-offloaded": ("deepspeed", zero(3, "optimizer", "param"), 2),
    "zero3-3": ("deepspeed", zero(3), 3),
}
"""Plugin, flags and ranks. Hardly a size of the model divides by 2, 3 or 4."""


def averages(kind: str) -> bool:
    """Whether it can keep an average."""
    return not kind.startswith("fsdp1")


CHECKED = some(KINDS, "single", "ddp-2", "fsdp-2-from-first", "fsdp-2x2", "fsdp1-2", "zero2-2-offloaded", "zero3-3")
AVERAGED = [kind for kind in CHECKED if averages(kind)]
Names = tuple[list[str], list[str]]
"""Of weights and moments, and of averages."""


def opened(kind: str):
    """The strategy on this rank, an average beside it, and its state as a snapshot."""
    subject = open_strategy(*KINDS[kind])
    parallel = subject.parallel
    ema = Ema(parallel.state.master_weights(), 0.5) if averages(kind) else None
    average = parallel.state.portable_weights(ema.shadows) if ema else None
    return subject, ema, Snapshot(step=1, state=subject.state(), ema=average, trainer={"step": 1})


def save_one(kind: str, folder: Path) -> None:
    """Train a little, in a way that no other kind does, and save; beside it, all tensors whole."""
    subject, _, _ = opened(kind)
    for number in range(3):
        subject.step(100 * list(KINDS).index(kind) + number)
    _, _, snapshot = opened(kind)
    where, parallel = folder / kind, subject.parallel
    subject.backend.decide(HookSpecs.save_checkpoint, state=snapshot, target=where, parallel=parallel, config=subject.config)
    whole = {group: {name: whole_tensor(each) for name, each in found.items()} for group, found in tensors_of(snapshot).items()}
    if parallel.world.is_main:
        for group, tensors in whole.items():
            save_file(tensors, where / f"{group}.safetensors")


def load_all(kind: str, others: list[str], folder: Path) -> dict[str, Names]:
    """Load what these kinds have saved; of what model, optimizer and average hold then, the names of what is not right."""
    wrong = {}
    for other in others:
        subject, ema, snapshot = opened(kind)
        parallel = subject.parallel
        [path] = (folder / other).glob("step-*")
        subject.backend.decide(HookSpecs.load_checkpoint, source=path, state=snapshot, parallel=parallel, config=subject.config)
        parallel.state.load(snapshot.state)
        if ema is not None:
            parallel.state.copy_from(snapshot.ema, ema.shadows)
        loaded = Snapshot(step=1, state=subject.state(), ema=parallel.state.portable_weights(ema.shadows) if ema else None)
        found = tensors_of(loaded)
        state, average = (different(found[group], folder / other / f"{group}.safetensors") for group in found)
        wrong[other] = state, average
    return wrong


def tensors_of(snapshot: Snapshot) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and moments, and the average."""
    moments = snapshot.state.optimizer_state.items()
    state = snapshot.state.model | {f"{name}.{moment}": each for name, found in moments for moment, each in found.items()}
    return {"state": dict(state), "average": dict(snapshot.ema or {})}


def different(found: dict[str, torch.Tensor], path: Path) -> list[str]:
    """The names under which this rank does not hold, bit for bit, its part of the whole tensors in a file."""
    expected = load_file(path)
    same = {name for name, each in found.items() if name in expected and bits(local(each)) == bits(part(expected[name], each))}
    return sorted((found.keys() | expected.keys()) - same)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a rank has of `whole` that has its local part of `like`; torch says which that is."""
    if not isinstance(like, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where each kind has saved what it trained."""
    folder = tmp_path_factory.mktemp("backends")
    for kind in CHECKED:
        (folder / kind).mkdir()
    return folder


@pytest.fixture(scope="module")
def wrong(folder) -> dict[str, dict[str, Names]]:
    """What each kind got wrong on any rank of what it has read of all others."""
    with ExitStack() as stack:
        kinds = {kind: KINDS[kind][2] for kind in CHECKED}
        ranks = sorted({*kinds.values()})
        started = {number: forked_processes(ranks=number, group=False, imports=("deepspeed",)) for number in ranks}
        crews = {number: stack.enter_context(crew) for number, crew in started.items()}
        for kind, number in kinds.items():
            crews[number].run(save_one, kind, folder)
        told = {kind: crews[number].run(load_all, kind, CHECKED, folder) for kind, number in kinds.items()}
    return {kind: {other: of_any_rank([rank[other] for rank in ranks]) for other in CHECKED} for kind, ranks in told.items()}


def of_any_rank(told: list[Names]) -> Names:
    state, average = (sorted(set().union(*each)) for each in zip(*told, strict=True))
    return state, average


@pytest.mark.parametrize(("writer", "reader"), [*permutations(CHECKED, 2)])
def test_weights_and_moments_arrive_bit_for_bit(wrong, writer, reader):
    assert wrong[reader][writer][0] == []


@pytest.mark.parametrize(("writer", "reader"), [*permutations(AVERAGED, 2)])
def test_the_average_arrives_bit_for_bit(wrong, writer, reader):
    assert wrong[reader][writer][1] == []


def test_every_kind_has_saved_something_of_its_own(wrong, folder):
    state = {(folder / kind / "state.safetensors").read_bytes() for kind in CHECKED}
    average = {(folder / kind / "average.safetensors").read_bytes() for kind in AVERAGED}
    assert (len(state), len(average)) == (len(CHECKED), len(AVERAGED))
