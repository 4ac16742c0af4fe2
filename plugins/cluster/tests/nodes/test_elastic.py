"""A group of nodes starts again without the one that was lost, and says what it does."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smalti.rundir import RunDirectory
from support.nodes.runs import Run
from support.whole import only_whole

PROBE = Path(__file__).parents[4] / "tests" / "e2e" / "probe"
LAST = 40
BATCH = {"num_processes": 2, "gradient_accumulation_steps": 1, "max_train_steps": LAST}


def elastic(cluster, directory, nodes="1:2", **options) -> Run:
    """One rank on each of two nodes."""
    return Run(cluster, directory, ranks=1, own={node: {"nodes": nodes} for node in (0, 1)}, **{**BATCH, **options})


def generations(directory) -> list[tuple]:
    """The number, the ranks and the accumulation of each generation of a run."""
    events = [each for each in RunDirectory(directory).events() if each.kind == "generation"]
    return [tuple(int(each.number(name)) for name in ("generation", "world_size", "accumulation")) for each in events]


def tensors(directory, step) -> dict:
    """All tensors of a checkpoint: weights, optimizer, EMA."""
    folder = RunDirectory(directory).checkpoints / f"step-{step:08d}"
    paths = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)} {name}": value for path in paths for name, value in load_file(path).items()}


def continued(cluster, directory, step, *, nodes) -> None:
    """The run of one process that resumes from this checkpoint, in another directory."""
    source = RunDirectory(directory).checkpoints / f"step-{step:08d}"
    other = directory.with_name(f"{directory.name}-continued")
    options = {**BATCH, "num_processes": 1, "gradient_accumulation_steps": 2, "resume_from_checkpoint": source}
    assert Run(cluster, other, nodes=nodes, ranks=1, **options).codes() == [0]
    expected, found = tensors(other, LAST), tensors(directory, LAST)
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_the_group_continues_without_a_lost_node(two_nodes, tmp_path):
    """`make torture`, D10 and F, lose node 0 too, which has the store and the run directory."""
    run = elastic(two_nodes, tmp_path / "run")
    run.wait_for_step(4)
    two_nodes.kill(1)
    code = run.processes[0].wait()
    output = run.processes[0].output
    assert code == 0, output
    assert generations(run.directory) == [(1, 2, 1), (2, 1, 2)], output
    saved = sorted(int(path.name.removeprefix("step-")) for path in RunDirectory(run.directory).checkpoints.glob("step-*"))
    assert 4 <= saved[0] < LAST
    assert f"generation 2: 1 node of 1, 1 rank, gradient_accumulation_steps=2, from step {saved[0]}" in output
    assert "node 1" in output
    continued(two_nodes, run.directory, saved[0], nodes=(0,))


def test_a_group_takes_back_a_node_that_waits_as_a_spare_and_loses_no_step(two_nodes, tmp_path):
    own = {node: {"nodes": "1:2", "rendezvous_timeout": 6} for node in (0, 1)}
    run = Run(two_nodes, tmp_path / "run", ranks=1, own=own, grow_after=1, **{**BATCH, "max_train_steps": 100_000})
    two_nodes.kill(1)  # before it takes part
    deadline = time.monotonic() + 90
    while run.step < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    late = run.start_again(1)
    while len(generations(run.directory)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert generations(run.directory) == [(1, 1, 2), (2, 2, 1)], run.outputs()
    [saved] = [int(path.name.removeprefix("step-")) for path in RunDirectory(run.directory).checkpoints.glob("step-*")]
    run.wait_for_step(saved + 2)
    late.send_signal(signal.SIGTERM)
    assert run.codes(60) == [6, 6], run.outputs()
    first, second = run.outputs()
    assert "this node is a spare: generation 1 trains without it, on 1 node" in second
    assert f"from step {saved}; the group of nodes grows at step {saved}: node 1 can take part" in first
    steps = [each.step for each in RunDirectory(run.directory).events() if each.kind == "step"]
    assert len(steps) == len(set(steps)), "steps are made twice"
    states = [each.text("state") for each in RunDirectory(run.directory).events() if each.kind == "state"]
    assert states == ["starting", "running", "restarting", "restarting", "running", "stopped"]


@only_whole(
    "plugins/cluster/tests/nodes/test_elastic.py::test_a_group_takes_back_a_node_that_waits_as_a_spare_and_loses_no_step"
)
def test_a_stop_that_comes_while_a_group_saves_in_order_to_grow_stops_all_its_nodes(two_nodes, tmp_path):
    own = {node: {"nodes": "1:2", "rendezvous_timeout": 6} for node in (0, 1)}
    options = {**BATCH, "max_train_steps": 100_000, "env": probed("request:0:0")}
    run = Run(two_nodes, tmp_path / "run", ranks=1, own=own, grow_after=1, **options)
    two_nodes.kill(1)
    deadline = time.monotonic() + 90
    while run.step < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    run.start_again(1)
    assert run.codes(90) == [7, 7], run.outputs()
    events = list(RunDirectory(run.directory).events())
    assert [each.fields["accepted"] for each in events if each.kind == "control_ack"] == [True]
    [saved] = [int(path.name.removeprefix("step-")) for path in RunDirectory(run.directory).checkpoints.glob("step-*")]
    assert [each.step for each in events if each.kind == "step"][-1] == saved
    assert "stopped while the group of nodes was formed; saved checkpoints are intact" in run.outputs()[0]


def test_a_node_that_dies_before_its_group_is_formed_again_is_named_and_left_out(two_nodes, tmp_path):
    run = elastic(two_nodes, tmp_path / "run", env=probed("kill:1:4"), rendezvous_timeout=8)
    deadline = time.monotonic() + 90
    while len(generations(run.directory)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    two_nodes.kill(1)  # it has said that it takes part
    assert run.processes[0].wait() == 0, run.outputs()
    assert generations(run.directory) == [(1, 2, 1), (2, 2, 1), (3, 1, 2)], run.outputs()
    assert "; generation 2 was not formed: node 1 did not come within 8 s" in run.outputs()[0]


def probed(spoil: str, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PROBE_SPOIL": spoil, **more}


def test_a_node_whose_accelerator_fails_leaves_and_is_not_started_again(two_nodes, tmp_path):
    """Node 0, which hands over the run directory."""
    run = elastic(two_nodes, tmp_path / "run", env=probed("report:0:4", PROBE_FAULT="STOP_SAVED"))
    assert run.codes() == [5, 0], run.outputs()
    assert generations(run.directory) == [(1, 2, 1), (2, 1, 2)], run.outputs()
    assert "the others continue without it" in run.outputs()[0]
    assert "node 0 has left the group" in run.outputs()[1]
    excluded = json.loads((run.directory / "excluded.json").read_text())["nodes"]
    assert [(each["machine_rank"], each["host"], each["reason"]) for each in excluded] == [(0, "node0", "ecc: spoiled")]
    again = elastic(two_nodes, tmp_path / "run", max_train_steps=LAST + 1, rendezvous_timeout=3)
    assert again.codes() == [10, 3], again.outputs()


def test_a_failure_that_would_come_again_ends_the_run_on_all_nodes(two_nodes, tmp_path):
    run = elastic(two_nodes, tmp_path / "run", env=probed("error:1:3"))
    assert run.codes() == [1, 1], run.outputs()
    assert generations(run.directory) == [(1, 2, 1)]


@only_whole(
    "plugins/cluster/tests/nodes/test_elastic.py::test_a_group_takes_back_a_node_that_waits_as_a_spare_and_loses_no_step"
)
def test_a_signal_to_one_node_of_a_group_stops_all(two_nodes, tmp_path):
    run = elastic(two_nodes, tmp_path / "run", max_train_steps=100_000)
    run.wait_for_step(2)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.codes(60) == [6, 6], run.outputs()
    assert len(generations(run.directory)) == 1


def test_a_single_node_starts_again_after_a_killed_rank_as_often_as_max_restarts_says(two_nodes, tmp_path):
    options = {"nodes": (0,), "ranks": 2, "max_restarts": 1, "max_train_steps": LAST}
    run = Run(two_nodes, tmp_path / "run", env=probed("kill:1:4"), **options)
    assert run.codes() == [9], run.outputs()
    assert generations(run.directory) == [(1, 2, 1), (2, 2, 1)], run.outputs()
    assert "the group is not started again: no step since 1 restarts (--max_restarts=1)" in run.outputs()[0]


@only_whole(
    "plugins/cluster/tests/nodes/test_runs.py::"
    "test_sigterm_to_all_processes_of_a_node_stops_all_nodes_with_the_code_of_a_preemption"
)
def test_a_second_signal_to_another_node_during_a_stop_leaves_the_stop_as_it_is(two_nodes, tmp_path):
    run = elastic(two_nodes, tmp_path / "run", max_train_steps=100_000)
    run.wait_for_step(2)
    run.processes[1].send_signal(signal.SIGTERM)
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.codes(60) == [6, 6], run.outputs()
    [saved] = [int(path.name.removeprefix("step-")) for path in RunDirectory(run.directory).checkpoints.glob("step-*")]
    assert saved == run.step


@only_whole("plugins/cluster/tests/nodes/test_elastic.py::test_the_group_continues_without_a_lost_node")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_during_a_stop_does_not_make_the_group_start_again(two_nodes, tmp_path, lost):
    run = elastic(two_nodes, tmp_path / "run", max_train_steps=100_000)
    run.wait_for_step(2)
    run.processes[1 - lost].send_signal(signal.SIGTERM)
    two_nodes.kill(lost)
    assert run.processes[1 - lost].wait(120) == 9, run.outputs()
    assert len(generations(run.directory)) == 1
    [saved] = [int(path.name.removeprefix("step-")) for path in RunDirectory(run.directory).checkpoints.glob("step-*")]
    assert f"saved step {saved} from rank {1 - lost} before leaving" in run.outputs()[1 - lost]
