"""Runs over two nodes of two ranks each: a signal, a lost link, a fault of an accelerator."""

import json
import os
import signal
from pathlib import Path

import pytest

from smalti.checkpoint import SUSPECT, CheckpointStore, verify
from support.nodes.runs import Run
from support.whole import some

PROBE = Path(__file__).parents[4] / "tests" / "e2e" / "probe"


def newest(run):
    """The newest checkpoint, which is complete and intact."""
    entry = CheckpointStore(run.directory / "checkpoints").all()[-1]
    assert verify(entry.path).problems == ()
    return entry


def probed(spoil: str, calls: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PROBE_SPOIL": spoil, "PROBE_CALLS": str(calls), **more}


@pytest.mark.parametrize("node", some([0, 1], 1))
def test_sigterm_to_all_processes_of_a_node_stops_all_nodes_with_the_code_of_a_preemption(two_nodes, tmp_path, node):
    run = Run(two_nodes, tmp_path / "run")
    run.wait_for_step(2)
    two_nodes.signal(node, signal.SIGTERM)
    assert run.codes(60) == [6, 6], run.outputs()
    assert all("preempted at step" in output for output in run.outputs())
    newest(run)
    assert two_nodes.leftovers() == []


def test_a_fault_that_one_rank_reports_stops_all_ranks_of_all_nodes_at_the_same_step(two_nodes, tmp_path):
    calls = tmp_path / "calls"
    run = Run(two_nodes, tmp_path / "run", env=probed("report:2:4", calls, PROBE_FAULT="STOP_SUSPECT"))
    assert run.codes(120) == [5, 5], run.outputs()
    ended = [call for call in map(json.loads, calls.read_text().splitlines()) if call["hook"] == "on_train_end"]
    assert ({call["rank"] for call in ended}, len({call["step"] for call in ended})) == ({0, 1, 2, 3}, 1)
    entry = newest(run)
    assert (entry.step, entry.manifest.flags) == (ended[0]["step"], (SUSPECT,))
    assert two_nodes.leftovers() == []
