"""Saving under `kill -9`: a process forks savers, kills them at random moments and looks what is left."""

import random

import pytest
import torch

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.state import PortableState
from smalti.types import World
from support.forked_ranks import forked_processes
from support.killing import kill_after

KILLS = 20


class SingleRank:
    world = World()

    def all_gather_text(self, value):
        return [value]


def snapshot(step):
    tensors = {str(number): torch.full((100_000,), float(step)) for number in range(4)}
    return Snapshot(step=step, state=PortableState(model=tensors), trainer={"step": step})


def save_for_ever(root, step, acknowledge):
    store = CheckpointStore(root)
    while True:
        save(root, snapshot(step), SingleRank())
        acknowledge(step)
        store.rotate(2)
        step += 1


def kill_once(root, step, delay):
    """Let a child save from `step` on and kill it `delay` seconds after its first save; the last step it acknowledged."""
    return kill_after(delay, lambda acknowledge: save_for_ever(root, step, acknowledge))


def look(root, acknowledged):
    """What a run that starts now would find."""
    store = CheckpointStore(root)
    path = store.latest()
    if path is None:
        return {"acknowledged": acknowledged, "found": None}
    target = snapshot(0)
    found = load(path, target, SingleRank()).trainer["step"]
    return {
        "acknowledged": acknowledged,
        "found": found,
        "sound": all(bool((tensor == found).all()) for tensor in target.state.model.values()),
        "visible": len(store.all()),
        "leftovers": sum(path.name.startswith((".partial", ".removed")) for path in root.iterdir()),
    }


def kill_savers(root, seed):
    """In a process of its own, which may fork."""
    chance = random.Random(seed)
    step, looks = 1, []
    for _ in range(KILLS):
        looks.append(look(root, kill_once(root, step, chance.uniform(0, 0.08))))
        step = looks[-1]["found"] + 1
    save(root, snapshot(step), SingleRank())
    CheckpointStore(root).rotate(2)
    return {"looks": looks, "left": sorted(path.name for path in root.iterdir()), "last": step}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed") / "checkpoints"
    seed = random.randrange(10**6)
    with forked_processes(ranks=1, group=False) as process:
        [result] = process.attempt(kill_savers, root, seed)
    assert result.error == "", f"seed {seed}: {result.error}"
    return result.value | {"seed": seed}


def test_the_last_acknowledged_checkpoint_survives_every_kill(killed):
    lost = [one for one in killed["looks"] if one["found"] is None or one["found"] < one["acknowledged"]]
    assert (lost, killed["seed"]) == ([], killed["seed"])


def test_what_is_found_after_a_kill_is_what_was_saved(killed):
    assert ([one for one in killed["looks"] if not one["sound"]], killed["seed"]) == ([], killed["seed"])


def test_a_kill_leaves_at_most_one_save_and_one_removal_unfinished(killed):
    assert max(one["leftovers"] for one in killed["looks"]) <= 2


def test_the_next_save_clears_everything_away(killed):
    assert killed["left"] == [".lock", *(f"step-{step:08d}" for step in (killed["last"] - 1, killed["last"]))]
