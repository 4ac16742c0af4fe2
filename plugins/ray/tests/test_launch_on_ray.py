"""`smalti launch ray` on a real cluster of raylets: what it trains, and what it does when parts of it are lost."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict

import pytest
import torch

from smalti_cluster.elastic.excluded import EXCLUDED, Exclusion
from support import ray_launches
from support.ray_launches import LOSSES, Launch, lose, tensors
from support.raylets import Raylets
from support.whole import WHOLE, some

LAST = 300 if WHOLE else 60
long = pytest.mark.skipif(not WHOLE, reason="minutes on a real cluster: make test-ray")


@pytest.fixture
def launched(raylets, tmp_path):
    """Starts drivers, which end with the test."""
    found: list[Launch] = []

    def launch(*flags: str, **options: object) -> Launch:
        options = {"max_train_steps": LAST, **options}
        found.append(Launch(raylets, tmp_path, f"run-{len(found)}", *flags, **options))
        return found[-1]

    yield launch
    for each in found:
        each.close()


@pytest.fixture(scope="module")
def raylets(tmp_path_factory):
    cluster = Raylets(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.add()
        cluster.add()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What two ranks of this machine have trained."""
    return tensors(ray_launches.local(tmp_path_factory.mktemp("local"), max_train_steps=LAST), LAST)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", some(["nothing", *LOSSES], "nothing"))
def test_two_workers_train_what_two_local_ranks_train_whatever_is_lost_on_the_way(raylets, launched, local, lost):
    if lost in ("raylet", "drained node"):
        raylets.add()  # one more, on which the run goes on
    launch = launched("--workers=2")
    if lost != "nothing":
        launch.wait_for_step(24)
        lose(lost, raylets, launch)
    assert launch.code() == 0, launch.output
    assert ("all workers start again" in launch.output) == (lost in ("worker", "raylet", "drained node")), launch.output
    assert ("Ray drains the node of worker" in launch.output) == (lost == "drained node"), launch.output
    found = tensors(launch.directory, LAST)
    assert found.keys() == local.keys()
    assert [name for name, value in local.items() if not torch.equal(value, found[name])] == [], launch.output


@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_to_the_driver_saves_and_stops(launched, number):
    launch = launched(f"--workers={number}", max_train_steps=100_000, checkpoint_step_interval=0)
    launch.wait_for_step(2)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.code() == 6, launch.output
    [saved] = launch.directory.checkpoints.glob("step-*")
    last = launch.directory.latest("step")
    assert last is not None
    assert int(saved.name.removeprefix("step-")) == last.step


def test_fewer_resources_than_asked_for_are_waited_for_and_named(launched):
    launch = launched("--workers=5", "--wait_seconds=2")
    assert launch.code() == 2, launch.output
    assert "waiting for 5 workers of 1 CPU, for " in launch.output
    assert "no place for 5 workers of 1 CPU in 2 s: the cluster has 2 CPU" in launch.output
    assert not launch.directory.path.exists()


@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_range_of_workers_goes_on_without_a_lost_node_and_takes_back_another(raylets, launched, lost):
    """Ray has reserved resources for worker 0; those of worker 1 come as they are free."""
    launch = launched("--workers=1:2", max_train_steps=100_000, grow_after=1, gradient_accumulation_steps=1)
    launch.wait_for_step(5)
    raylets.lose(raylets.node_of(launch.worker(lost)))
    assert generations(launch, 2) == [(2, 1), (1, 2)], launch.output
    raylets.add()
    assert generations(launch, 3) == [(2, 1), (1, 2), (2, 1)], launch.output
    launch.process.send_signal(signal.SIGTERM)
    assert launch.code() == 6, launch.output


@long
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="a name for a node of this machine takes the rights of root")
@pytest.mark.parametrize("cores", [0, 1])
def test_a_lost_worker_comes_back_on_a_new_node_and_not_on_one_whose_accelerator_has_failed(launched, raylets, cores):
    """Ray moves what it has reserved for worker 0 to the faulty node if that is free, else to the new one."""
    launch = launched("--workers=1:2", max_train_steps=100_000, grow_after=1, gradient_accumulation_steps=1)
    launch.wait_for_step(5)
    fault = Exclusion(machine_rank=2, host="faulty", rank=2, device="GPU-2", reason="xid 79", time=time.time())
    (launch.directory.path / EXCLUDED).write_text(json.dumps({"nodes": [asdict(fault)]}))
    raylets.add(cores, host="faulty")
    raylets.lose(raylets.node_of(launch.worker(0)))
    assert generations(launch, 2) == [(2, 1), (1, 2)], launch.output
    time.sleep(20)  # longer than Ray takes to find the node lost and to move what was reserved
    assert generations(launch, 2) == [(2, 1), (1, 2)], launch.output
    raylets.add(host="sound")
    assert generations(launch, 3) == [(2, 1), (1, 2), (2, 1)], launch.output
    assert raylets.node_of(launch.worker(0)) == len(raylets.nodes) - 1
    assert ("no worker is placed on faulty: an accelerator has failed there" in launch.output) == (cores == 1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.code() == 6, launch.output


def generations(launch: Launch, least: int, seconds: float = 300) -> list[tuple[float | None, float | None]]:
    """Ranks and accumulation of each group, as soon as there are this many or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found = [each for each in launch.directory.events() if each.kind == "generation"]
        if len(found) >= least or time.monotonic() > deadline:
            return [(each.number("world_size"), each.number("accumulation")) for each in found]
        time.sleep(0.2)
