"""A7: checkpoints written by some ranks and read by others: tensors of any shape, cut in any way, bit for bit."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import PortableState
from smalti.types import World
from smalti_testing import two_processes

from .subject import Report

CASES = 6
"""Checkpoints of one round, since starting the processes takes longest."""


def resharded(chance: Random, place: Path) -> Report:
    """Written on one number of ranks, read on another."""
    report = Report()
    writers, readers = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 3, 4))
    cases = [chance.randrange(10**9) for _ in range(CASES)]
    with two_processes(ranks=writers) as crew:
        crew.run(write, cases, place)
    for case in cases:
        [path] = (place / str(case)).glob("step-*")
        report.expect(verify(path).ok, f"what {writers} ranks wrote does not verify")
    with two_processes(ranks=readers) as crew:
        for wrong in crew.run(read, cases, place):
            report.broken += [f"from {writers} to {readers} ranks: {each}" for each in wrong]
    report.faults += len(cases)
    return report


def write(cases: list[int], place: Path) -> None:
    """On every writer."""
    for case in cases:
        save(place / str(case), snapshot(case, tensors_of(case), "writer"), this_rank())


def read(cases: list[int], place: Path) -> list[str]:
    """On every reader: what differs from what was written."""
    wrong = []
    for case in cases:
        expected = tensors_of(case)
        empty = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        into = snapshot(case, empty, "reader")
        [path] = (place / str(case)).glob("step-*")
        load(path, into, this_rank())  # type: ignore[arg-type]
        found = {name: whole(tensor) for name, tensor in into.tensors().items()}
        wrong += [f"{name} of case {case}" for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    return wrong


def this_rank() -> GlooCommunicator:
    return GlooCommunicator(world=World(rank=dist.get_rank(), size=dist.get_world_size()), group=dist.group.WORLD)


def tensors_of(case: int) -> dict[str, Tensor]:
    """Whole tensors of odd shapes, under the names of a checkpoint: the same in every process."""
    chance, values = Random(case), torch.Generator().manual_seed(case)
    shapes = {
        f"layer.{number}": tuple(chance.choice((1, 2, 3, 5, 8, 17)) for _ in range(chance.randint(1, 3))) for number in range(8)
    }
    shapes["scalar"] = ()
    model = {f"model/{name}": torch.randn(shape, generator=values) for name, shape in shapes.items()}
    moments = {
        f"optimizer/{name}.exp_avg{squared}": torch.randn(shape, generator=values) ** (2 if squared else 1)
        for name, shape in shapes.items()
        for squared in ("", "_sq")
    }
    ema = {f"ema/{name}": torch.randn(shape, generator=values) for name, shape in shapes.items()}
    return model | moments | ema


def snapshot(case: int, tensors: dict[str, Tensor], side: str) -> Snapshot:
    """The tensors, cut over the ranks in a way that depends on case and side."""
    chance = Random(f"{case} {side} {dist.get_world_size()}")
    mesh = random_mesh(chance)
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        groups[group][key] = cut(tensor, mesh, chance)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in groups["optimizer"].items():
        name, _, moment = key.rpartition(".")
        moments.setdefault(name, {})[moment] = tensor
    state = PortableState(model=groups["model"], optimizer_state=moments, optimizer="AdamW")
    return Snapshot(step=1, state=state, ema=groups["ema"], trainer={"step": 1})


def random_mesh(chance: Random) -> DeviceMesh:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (2, 2) if size == 4 and chance.random() < 0.5 else (size,))


def cut(tensor: Tensor, mesh: DeviceMesh, chance: Random) -> Tensor:
    """Whole on every rank, or cut along one dimension and copied along the others."""
    if tensor.ndim == 0 or chance.random() < 0.2:
        return tensor.clone()
    placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    placements[-1] = Shard(chance.randrange(tensor.ndim))
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
