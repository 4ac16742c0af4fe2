"""`smalti doctor --nodes` and the preflight of `smalti train` on nodes that differ: what is wrong is found and named."""

from __future__ import annotations

import json
import sys

import pytest

from support.nodes import Cluster, forbidden
from support.nodes.runs import Run


@pytest.fixture(scope="module")
def three_nodes():
    if reason := forbidden():
        pytest.skip(reason)
    with Cluster(3, warm=True) as cluster:
        yield cluster


def check(cluster, directory, *, clocks=None):
    """The report of node 0, with the exit codes of all nodes."""
    flags = [f"--output_dir={directory}", f"--num_machines={cluster.count}", f"--main_process_ip={cluster.address(0)}"]
    command = [sys.executable, "-m", "smalti", "doctor", "--nodes", "--json", "--use_cpu", "--rendezvous_timeout=60", *flags]
    processes = [
        cluster.start(node, [*command, f"--machine_rank={node}"], clock=(clocks or {}).get(node, 0))
        for node in range(cluster.count)
    ]
    codes = [process.wait(100) for process in processes]
    _, brace, rest = processes[0].output.partition("{")
    assert brace, [each.output for each in processes]
    return json.JSONDecoder().raw_decode(brace + rest)[0], codes


def messages(report, level) -> list[str]:
    return [each["message"] for each in report["findings"] if each["level"] == level]


def test_another_directory_under_the_same_name_is_found_by_doctor_and_by_train(two_nodes, tmp_path):
    two_nodes.private(1, tmp_path / "run")
    report, codes = check(two_nodes, tmp_path / "run")
    assert codes == [3, 3]
    [message] = messages(report, "error")
    assert message.startswith(f"output_dir is not one directory: {tmp_path}/run on ")
    assert "on node 1 (node1)" in message
    run = Run(two_nodes, tmp_path / "run", ranks=1)
    assert run.codes() == [3, 3], run.outputs()
    assert all("output_dir is not one directory" in output for output in run.outputs())


def test_a_clock_that_is_ahead_is_named_with_its_offset(two_nodes, tmp_path):
    report, codes = check(two_nodes, tmp_path / "run", clocks={1: 600})
    assert codes == [0, 0]
    [message] = messages(report, "warning")
    assert message.startswith("the clock of node 1 (node1) is 600.")
    assert report["measured"]["clocks"]["1"] == pytest.approx(600, abs=3)


def test_of_three_nodes_a_slow_link_is_named_and_who_does_not_reach_whom(three_nodes, tmp_path):
    """Both node 1 and node 2 reach node 0, but not each other; and node 2 is slow."""
    three_nodes.slow(2, mbit=20)
    assert three_nodes.start(2, ["ip", "route", "add", "unreachable", f"{three_nodes.address(1)}/32"]).wait() == 0
    report, codes = check(three_nodes, tmp_path / "run")
    assert codes == [3, 3, 3]
    [message] = [each for each in messages(report, "warning") if "slow link" in each]
    assert message.startswith("node 2 (node2) has a slow link: ")
    assert report["measured"]["links"]["0-1"] > 4 * report["measured"]["links"]["2-0"]
    found = {each.partition(" at ")[0] for each in messages(report, "error") if "cannot connect" in each}
    assert found == {
        "node 2 (node2) cannot connect to node 1 (node1)",
        "node 1 (node1) cannot connect to node 2 (node2)",
    }
