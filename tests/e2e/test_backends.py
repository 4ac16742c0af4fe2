"""A checkpoint of any strategy on any number of ranks is read by any other, bit for bit."""

import hashlib
import json
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest

from smalti.checkpoint.snapshot import Snapshot
from smalti.ema import Ema
from smalti.testing import two_processes
from smalti.testing.strategy_subject import open_strategy, whole_state, whole_tensor

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
AVERAGED = [kind for kind in KINDS if not kind.startswith("fsdp1")]
"""Those that can keep an average."""
Digests = tuple[str, str]
"""Of weights and moments, and of the average."""


def opened(kind: str):
    """The strategy on this rank, an average beside it, and its state as a snapshot."""
    subject = open_strategy(*KINDS[kind])
    parallel = subject.parallel
    ema = Ema(parallel.masters(subject.model), 0.5) if kind in AVERAGED else None
    average = parallel.portable(ema.shadows) if ema else None
    return subject, ema, Snapshot(step=1, state=subject.state(), ema=average, trainer={"step": 1})


def digests_of(snapshot: Snapshot) -> Digests:
    """Of all whole tensors. Every rank calls it."""
    average = {name: whole_tensor(tensor) for name, tensor in (snapshot.ema or {}).items()}
    return digest(whole_state(snapshot.state)), digest(average)


def digest(tensors: dict) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].numpy().tobytes())
    return total.hexdigest()


def save_one(kind: str, folder: Path) -> Digests:
    """Train a little, in a way that no other kind does, and save; the digests of what was saved."""
    subject, _, _ = opened(kind)
    for number in range(3):
        subject.step(100 * list(KINDS).index(kind) + number)
    _, _, snapshot = opened(kind)
    where, parallel = folder / kind, subject.parallel
    subject.backend.save_checkpoint(state=snapshot, target=where, parallel=parallel, config=subject.config)
    return digests_of(snapshot)


def load_all(kind: str, folder: Path) -> dict[str, Digests]:
    """Load what every other kind has saved; the digests of what model, optimizer and average hold then."""
    found = {}
    for other in KINDS:
        subject, ema, snapshot = opened(kind)
        parallel = subject.parallel
        [path] = (folder / other).glob("step-*")
        subject.backend.load_checkpoint(source=path, state=snapshot, parallel=parallel)
        parallel.load_portable_state(subject.model, subject.optimizer, snapshot.state)
        if ema is not None:
            parallel.put_back(snapshot.ema, ema.shadows)
        loaded = Snapshot(step=1, state=subject.state(), ema=parallel.portable(ema.shadows) if ema else None)
        found[other] = digests_of(loaded)
    return found


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """What each kind has saved, and what each kind has read of all others."""
    folder = tmp_path_factory.mktemp("backends")
    for kind in KINDS:
        (folder / kind).mkdir()
    with ExitStack() as stack:
        ranks = sorted({ranks for _, _, ranks in KINDS.values()})
        crews = {number: stack.enter_context(two_processes(ranks=number, group=False)) for number in ranks}
        saved = {kind: crews[KINDS[kind][2]].run(save_one, kind, folder)[0] for kind in KINDS}
        read = {kind: crews[KINDS[kind][2]].run(load_all, kind, folder)[0] for kind in KINDS}
    return saved, read


@pytest.mark.parametrize(("writer", "reader"), [*permutations(KINDS, 2)])
def test_weights_and_moments_arrive_bit_for_bit(digests, writer, reader):
    saved, read = digests
    assert read[reader][writer][0] == saved[writer][0]


@pytest.mark.parametrize(("writer", "reader"), [*permutations(AVERAGED, 2)])
def test_the_average_arrives_bit_for_bit(digests, writer, reader):
    saved, read = digests
    assert read[reader][writer][1] == saved[writer][1]


def test_every_kind_has_saved_something_of_its_own(digests):
    saved, _ = digests
    found = {state for state, _ in saved.values()} | {saved[kind][1] for kind in AVERAGED}
    assert len(found) == len(KINDS) + len(AVERAGED)
