"""Nodes that share no file system, each a process in a folder of its own: a mirror is all that they have in common."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from smalti.checkpoint import CheckpointStore, SaveError, Snapshot, find_on_all_ranks, load, save, verify
from smalti.parallel import PortableState
from smalti.rundir import RunDirectory, acquire
from smalti_storage_s3.mirror.nodes import MirrorRelay, bring
from smalti_storage_s3.mirror.place import Access
from support.forked_ranks import Pair, forked_processes

RUN = Path("run")
WORD = ("a", "b", "c")


def snapshot(step: int, place: Path | None = None) -> Snapshot:
    tensors = {name: torch.full((1000,), float(step)) for name in WORD}
    relay = MirrorRelay(str(place), Access()) if place is not None else None
    return Snapshot(step=step, state=PortableState(model=tensors), trainer={"step": step}, relay=relay)


def node(folder: Path) -> tuple[int, Pair]:
    """This rank, in the folder of its node."""
    rank = int(os.environ["RANK"])
    (folder / f"node{rank}").mkdir(parents=True, exist_ok=True)
    os.chdir(folder / f"node{rank}")
    return rank, Pair(rank)


def save_steps(folder: Path, place: Path, steps: list[int]) -> list[str]:
    """What this node sees of the checkpoints."""
    rank, pair = node(folder)
    if rank == 0:
        acquire(RunDirectory(RUN)).close()
    for step in steps:
        save(RUN / "checkpoints", snapshot(step, place), pair)
    return sorted(str(file.relative_to(RUN)) for file in RUN.glob("checkpoints/*/*/*"))


def resume(folder: Path, place: Path, choice: str) -> tuple[str, list[float], list[str]]:
    _, pair = node(folder)
    store = CheckpointStore(RUN / "checkpoints")
    found = find_on_all_ranks(pair, store, choice, shared=False)
    assert found is not None
    bring(str(place), Access(), RunDirectory(RUN), found, pair)
    into = snapshot(0)
    load(found, into, pair)
    return str(found), [float(into.state.model[name].sum()) for name in WORD], [entry.path.name for entry in store.all()]


def save_without_place(folder: Path, place: Path) -> tuple[str, list[str]]:
    _, pair = node(folder)
    with pytest.raises(SaveError) as failure:
        save(RUN / "checkpoints", snapshot(9, place), pair)
    return failure.value.message, [path.name for path in (RUN / "checkpoints").iterdir() if path.name != ".lock"]


@pytest.fixture(scope="module")
def nodes():
    with forked_processes(imports=["smalti_storage_s3.mirror.nodes", "smalti_storage_s3.mirror.upload"]) as pair:
        yield pair


def test_every_node_writes_its_part_and_the_checkpoint_is_whole_on_node_0(nodes, tmp_path):
    place = tmp_path / "nas"
    files = nodes.run(save_steps, tmp_path, place, [1, 2])
    assert [name for name in files[0] if name.startswith("checkpoints/step-00000002/")] == [
        "checkpoints/step-00000002/model/rank-00000-part-00000.safetensors",
        "checkpoints/step-00000002/model/rank-00001-part-00000.safetensors",
    ]
    assert files[1] == []
    assert verify(tmp_path / "node0" / "run" / "checkpoints" / "step-00000002").ok
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_a_checkpoint_reaches_nodes_that_have_none_or_an_older_one(nodes, tmp_path):
    place = tmp_path / "nas"
    nodes.run(save_steps, tmp_path, place, [1, 2])
    path = "run/checkpoints/step-00000001"
    assert nodes.run(resume, tmp_path, place, "1") == [
        (path, [1000.0] * 3, ["step-00000001", "step-00000002"]),
        (path, [1000.0] * 3, ["step-00000001"]),
    ]
    path = "run/checkpoints/step-00000002"
    assert nodes.run(resume, tmp_path, place, "latest") == [
        (path, [2000.0] * 3, ["step-00000001", "step-00000002"]),
        (path, [2000.0] * 3, ["step-00000002"]),
    ]


def test_a_part_that_cannot_be_carried_fails_the_save_on_every_node_and_leaves_nothing(nodes, tmp_path):
    place = tmp_path / "nas"
    place.mkdir()
    (place / "parts").write_text("in the way")
    found = nodes.run(save_without_place, tmp_path, place)
    assert "rank 1" in found[0][0]
    assert [str(place / "parts") in message for message, _ in found] == [True, True]
    assert [left for _, left in found] == [[], []]
