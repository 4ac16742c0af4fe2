"""Sharding on two and three processes: what a rank holds, what a step costs, how long a save keeps it waiting.

- share: bytes of parameters, gradients, optimizer state and EMA on the fullest of three ranks over a third of the total, for a
  model whose sizes three does not divide.
- step: forward, backward, clipping and optimizer of the demo's model under FSDP2 and ZeRO 1, 2, 3 over the same under DDP, in
  the same two processes, turn by turn. Between processes on one machine all that they send more than DDP costs CPU time.
- peak: how far the resident memory of the fuller of two fresh processes rises above what it was before the model, over DDP.
- blocked: what an asynchronous save takes from the loop over a synchronous one, under FSDP2 on two processes.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.config import OptimizerOptions
from smalti.config.resolution import resolve
from smalti.hookspecs import HookSpecs
from smalti.parallel.devices import native_bf16
from smalti.parallel.protocol import Communicator, Parallel
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.schema import schema_of
from smalti.training.build_run import build_model, build_optimizer, open_parallel
from smalti.training.optim.ema import Ema
from smalti.training.optim.optimizers import matrices, parameter_groups
from smalti_toy.family import ToyFamily, ToyShape

HERE = Path(__file__).parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "tests")]  # ranks have this file, and no path to the others
from sizes import WARM_UP, sized  # noqa: E402

from support.forked_ranks import forked_processes  # noqa: E402

if TYPE_CHECKING:
    from run import Result

    from smalti.types import Checkpoint

UNEVEN = ToyShape(width=196, depth=6, heads=7)
DEMO = sized(ToyShape(), short=ToyShape(width=28, depth=1, heads=7))
SMALL = ToyShape(width=28, depth=1, heads=7)
LARGE = sized(ToyShape(width=768, depth=6, heads=12), short=SMALL)
BATCH, SIZE = sized(16, short=1), 32
ROUND, PAIRS = sized((4, 8), short=(1, 1))
SAVES = sized(5, short=1)


def zero(stage: int) -> str:
    return f'--deepspeed_config={{"zero_optimization": {{"stage": {stage}}}}}'


DDP: tuple[str, ...] = ()
SHARDED = {"FSDP2": ("--fsdp_enable",), **{f"ZeRO {stage}": (zero(stage),) for stage in (1, 2, 3)}}
GOALS = {"FSDP2": 1.5, "ZeRO 1": 1.5, "ZeRO 2": 1.5, "ZeRO 3": 2.5}
"""Of a step over DDP's."""
IMPORTS = ("smalti_fsdp2.sharding", "deepspeed")


def measure() -> list[Result]:
    from run import paired

    with forked_processes(ranks=3, group=False, seconds=600) as three:
        parts = three.run(bytes_held, 3)
    share = paired(
        "shard: bytes on the fullest of three ranks over a third",
        [max(part for part, _ in parts)],
        [parts[0][1] / 3],
        unit="bytes",
        goal=1.05,
        precision="fp32",
    )
    with forked_processes(ranks=2, group=False, seconds=600, imports=IMPORTS) as two, tempfile.TemporaryDirectory() as folder:
        times, precision = two.run(step_times)[0]
        waits = two.run(save_waits, Path(folder))[0]
    peaks = {kind: peak(flags) for kind, flags in {"DDP": DDP, **SHARDED}.items()}
    return [
        share,
        *(
            paired(
                f"shard: step under {kind} over DDP, two processes",
                times[kind],
                times["DDP"],
                unit="s/step",
                goal=goal,
                precision=precision,
            )
            for kind, goal in GOALS.items()
        ),
        *(
            paired(
                f"shard: peak memory under {kind} over DDP",
                [peaks[kind]],
                [peaks["DDP"]],
                unit="bytes",
                goal=1.0,
                precision="fp32",
            )
            for kind in SHARDED
        ),
        paired("shard: blocked, asynchronous save over synchronous", *waits, unit="s", goal=0.1, precision="fp32"),
    ]


class Subject:
    """A strategy with its model, optimizer and EMA on this rank."""

    def __init__(self, ranks: int, shape: ToyShape, *flags: str, precision: str = "fp32") -> None:
        plugins = load_plugins()
        arguments = [f"--num_processes={ranks}", "--use_cpu", "--accelerate_config=none", *flags]
        arguments += [f"--mixed_precision={'bf16' if precision == 'bf16' else 'no'}"]
        config = resolve(schema_of(plugins), arguments, environment={})
        plan = choose_distributed(config, plugins)
        self.config = config
        self.parallel: Parallel = open_parallel(plan, config)
        self.family = ToyFamily(shape)
        bare, blocks = build_model(config, plugins, self.family)
        self.backend = plugins.backend(plan)
        decayed, weights = matrices(bare), self.family.weights(0)
        model = self.backend.decide(
            HookSpecs.wrap_model, model=bare, family=self.family, blocks=blocks, parallel=self.parallel, weights=weights
        )
        assert model is not None
        groups = parameter_groups(self.parallel.unwrap(model), config[OptimizerOptions].adam_weight_decay, decayed)
        optimizer = build_optimizer(config, plugins, model, groups)
        self.model, self.optimizer = self.parallel.setup(model, optimizer)
        self.ema = Ema(dict(self.parallel.unwrap(self.model).named_parameters()), 0.99)
        self.images = torch.randn(BATCH, 3, SIZE, SIZE)

    def backward(self) -> None:
        conditioning = self.family.encode_captions(["a face"] * BATCH)
        with self.parallel.accumulate(last=True):
            with self.parallel.autocast():
                prediction = self.family.forward(self.model, self.images, torch.full((BATCH,), 500.0), conditioning)
            self.parallel.backward(prediction.float().square().mean())
        self.parallel.clip_gradients(1.0)

    def step(self) -> None:
        self.backward()
        self.parallel.step()


@cache
def subject(ranks: int, shape: ToyShape, *flags: str, precision: str = "fp32") -> Subject:
    return Subject(ranks, shape, *flags, precision=precision)


def bytes_held(ranks: int) -> tuple[int, int]:
    """Bytes on this rank, and of the whole."""
    found = subject(ranks, UNEVEN, "--fsdp_enable")
    found.step()
    found.backward()
    parameters = list(found.model.parameters())
    tensors: list[Tensor] = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    tensors += found.ema.shadows.values()
    tensors += [moment for state in found.optimizer.state.values() for moment in state.values() if moment.ndim]
    return sum(local(each).nbytes for each in tensors), sum(each.numel() * each.element_size() for each in tensors)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step_times() -> tuple[dict[str, list[float]], str]:
    """Seconds per step by strategy, round by round; and the precision of this machine, in which they are."""
    precision = "bf16" if native_bf16("cpu").native else "fp32"
    subjects = {kind: subject(2, DEMO, *flags, precision=precision) for kind, flags in {"DDP": DDP, **SHARDED}.items()}
    times: dict[str, list[float]] = {kind: [] for kind in subjects}
    for _ in range(PAIRS + WARM_UP):
        for kind, found in subjects.items():
            begin = time.perf_counter()
            for _ in range(ROUND):
                found.step()
            times[kind].append((time.perf_counter() - begin) / ROUND)
    return {kind: found[WARM_UP:] for kind, found in times.items()}, precision


def peak(flags: tuple[str, ...]) -> int:
    """Bytes of the fuller of two new processes."""
    with forked_processes(ranks=2, group=False, seconds=600, imports=IMPORTS) as two:
        taken: list[int] = two.run(memory_taken, flags)
        return max(taken)


def memory_taken(flags: tuple[str, ...]) -> int:
    """How far three steps of a strategy raise the resident memory of this process."""
    subject(2, SMALL, *flags).step()  # imports, threads, compiled code
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    found = subject(2, LARGE, *flags)
    for _ in range(3):
        found.step()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def checkpoint_times(stage: int, folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds to save and to load, ours and DeepSpeed's, pair by pair."""
    from smalti.checkpoint.format.store import CheckpointStore
    from smalti.checkpoint.search import find_on_all_ranks
    from smalti.checkpoint.snapshot import Snapshot

    found = subject(2, LARGE, zero(stage))
    found.step()
    times: dict[str, tuple[list[float], list[float]]] = {"save": ([], []), "load": ([], [])}

    def save_ours(place: Path) -> None:
        state = found.parallel.state.portable()
        snapshot = Snapshot(step=1, state=state, trainer={"step": 1})
        found.backend.decide(
            HookSpecs.save_checkpoint, state=snapshot, target=place, parallel=found.parallel, config=found.config
        )

    def load_ours(place: Path) -> None:
        state = found.parallel.state.empty()
        snapshot = Snapshot(step=1, state=state, trainer={"step": 1})
        path = find_on_all_ranks(found.parallel, CheckpointStore(place), "latest")  # reads and checks all of it
        assert path is not None
        found.backend.decide(
            HookSpecs.load_checkpoint, source=path, state=snapshot, parallel=found.parallel, config=found.config
        )
        found.parallel.state.load(snapshot.state)

    def save_theirs(place: Path) -> None:
        found.model.save_checkpoint(str(place))  # type: ignore[operator]

    def load_theirs(place: Path) -> None:
        found.model.load_checkpoint(str(place))  # type: ignore[operator]

    for number in range(SAVES + WARM_UP):
        for kept, save, load in ((0, save_ours, load_ours), (1, save_theirs, load_theirs)):
            place = folder / f"{stage}-{number}-{kept}"
            for act, do in (("save", save), ("load", load)):
                if act == "load":
                    found.optimizer.state.clear()  # as in a run that resumes
                found.parallel.barrier()
                begin = time.perf_counter()
                do(place)
                found.parallel.barrier()
                times[act][kept].append(time.perf_counter() - begin)
            if found.parallel.world.is_main:
                shutil.rmtree(place)
    return {act: (ours[WARM_UP:], theirs[WARM_UP:]) for act, (ours, theirs) in times.items()}


def save_waits(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds that the loop stands still for an asynchronous and for a synchronous save, pair by pair."""
    from smalti.checkpoint.async_saver import Saver
    from smalti.checkpoint.snapshot import Snapshot

    found = subject(2, LARGE, "--fsdp_enable")
    found.step()

    def write(state: Snapshot, communicator: Communicator) -> Checkpoint:
        checkpoint = found.backend.decide(
            HookSpecs.save_checkpoint, state=state, target=folder, parallel=communicator, config=found.config
        )
        assert checkpoint is not None, "the core's own answer comes last"
        return checkpoint

    saver = Saver(write=write, communicator=found.parallel, background=found.parallel.background_communicator())
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (SAVES + WARM_UP)):
        beside = number % 2 == 0
        state = found.parallel.state.portable()
        snapshot = Snapshot(step=number, state=state, ema=found.ema.shadows, trainer={"step": number})
        begin = time.perf_counter()
        saver.begin(snapshot, blocking=not beside)
        blocked = time.perf_counter() - begin
        found.backward()
        begin = time.perf_counter()
        saver.wait_for_staging()
        blocked += time.perf_counter() - begin
        found.parallel.step()
        saver.poll(finish=True)
        times[beside].append(blocked)
    saver.close()
    return times[True][WARM_UP:], times[False][WARM_UP:]
