"""The nodes of the tests are separate but for the network between them and the files they share."""

import subprocess
import sys
import time

import pytest

from support.nodes import Cluster, forbidden

TALK = "import sys, socket; print(socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])).recv(9))"
ANSWER = "import socket; s = socket.create_server(('', 7))\nwhile True: s.accept()[0].send(b'here')"


@pytest.fixture(scope="module")
def cold():
    if reason := forbidden():
        pytest.skip(reason)
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def pair(cold):
    yield cold
    cold.reset()


def run(cluster, node, *command, **options) -> str:
    process = cluster.start(node, [*command], **options)
    process.wait(30)
    return process.output.strip()


def talk(cluster, seconds=10.0) -> str:
    return run(cluster, 0, sys.executable, "-c", TALK, "node1", str(seconds))


def test_each_node_has_its_own_name_processes_and_shared_memory(pair):
    assert [run(pair, node, "hostname") for node in (0, 1)] == ["node0", "node1"]
    run(pair, 0, "touch", "/dev/shm/of-node0")
    assert run(pair, 1, "ls", "/dev/shm") == ""
    sleeping = pair.start(0, ["sleep", "60"])
    there = run(pair, 1, sys.executable, "-c", "import psutil; print(len(psutil.pids()))")
    assert (there, [each.pid for each in pair.processes(0)]) == ("2", [sleeping.pid])


def test_a_cut_node_is_silent_and_a_healed_one_answers(pair):
    pair.start(1, [sys.executable, "-c", ANSWER])
    while "here" not in (heard := talk(pair)):
        assert "refused" in heard  # not yet
    pair.cut(1)
    assert "timed out" in talk(pair, 0.3)
    pair.heal(1)
    assert "here" in talk(pair)


def test_nothing_of_a_node_reaches_this_machine(pair):
    before = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "bridge" not in before
    assert "unreachable" in run(pair, 0, sys.executable, "-c", TALK, "192.0.2.1", "1")


def test_a_process_can_have_another_clock(pair):
    ahead = run(pair, 0, sys.executable, "-c", "import time; print(time.time())", clock=600)
    assert 590 < float(ahead) - time.time() < 610


def test_one_path_can_be_another_directory_on_one_node(pair, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "file").touch()
    other = pair.private(1, tmp_path / "shared")
    assert [run(pair, node, "ls", str(tmp_path / "shared")) for node in (0, 1)] == ["file", ""]
    run(pair, 1, "touch", str(tmp_path / "shared" / "own"))
    assert (other / "own").exists()


def test_a_process_whose_parent_has_ended_is_found_and_every_process_can_be_killed(pair):
    shell = pair.start(1, ["sh", "-c", "sleep 77 & exit 3"])
    assert shell.wait() == 3
    assert pair.leftovers(0.1) == ["sleep 77"]
    pair.kill(1)
    assert pair.leftovers() == []


def test_signals_and_exit_codes_are_those_of_the_process(pair):
    sleeping = pair.start(0, ["sleep", "60"])
    assert sleeping.poll() is None
    sleeping.send_signal(15)
    assert sleeping.wait() == -15
