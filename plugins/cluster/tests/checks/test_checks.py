"""Nodes are checked against each other: each is a process of its own, with its own directory for what they should share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smalti.errors import PreflightError
from smalti_cluster.checks.agent import Identity
from smalti_cluster.checks.checks import check_nodes
from smalti_cluster.checks.peers import best_rates, rounds
from smalti_cluster.checks.report import NodesReport
from smalti_cluster.checks.service import Service, gather_nodes
from support.node_agent import actions_of, measurement

SCRIPT = Path(__file__).parents[4] / "tests" / "support" / "node_agent.py"
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && getenv("CLOCK_AHEAD")) now->tv_sec += atoi(getenv("CLOCK_AHEAD"));
    return code;
}
"""


@pytest.fixture
def shared(tmp_path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def service(shared) -> Iterator[Callable[..., Service]]:
    """service(3) -> the service of node 0, of three nodes."""
    made: list[Service] = []

    def make(count: int, address: str = "127.0.0.1") -> Service:
        own = Identity(machine_rank=0, num_machines=count, host="first", version="1")
        made.append(Service(own, actions_of(shared, {}, 1e14), address=address, port=_free_port()))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def start(shared) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(service, 1, folder=..., facts={...}) -> the process of that node."""
    processes = []

    def begin(service: Service, rank: int, environment: dict[str, str] | None = None, **given: object) -> subprocess.Popen[str]:
        whole = {
            "machine_rank": rank,
            "num_machines": service.own.num_machines,
            "host": f"host-{rank}",
            "port": service.port,
            "folder": str(shared),
            **given,
        }
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(whole)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        processes.append(process)
        return process

    yield begin
    for each in processes:
        each.kill()
        each.communicate()


def checked(service: Service, *, full: bool = False, last: NodesReport | None = None) -> NodesReport:
    assert gather_nodes(service, 60, lambda waited, missing: None) == []
    return check_nodes(service, bandwidth=full, devices=full, last=last)


def ended(process: subprocess.Popen[str]) -> dict[str, dict[str, object]]:
    output, _ = process.communicate(timeout=60)
    return json.loads(output)


def messages(report: NodesReport, *levels: str) -> list[str]:
    return [finding.message for finding in report.of_level(*levels or ("error", "warning"))]


def test_nodes_that_have_the_same_pass_and_nothing_is_left(service, start, shared):
    node_0 = service(3)
    others = [start(node_0, rank) for rank in (2, 1)]
    report = checked(node_0)
    node_0.end({"findings": []})
    assert [ended(each)["ended"] for each in others] == [{"findings": []}] * 2
    assert messages(report) == []
    assert report.nodes == {0: "first", 1: "host-1", 2: "host-2"}
    assert report.measured.visible_seconds is not None
    assert list(shared.iterdir()) == []
    assert NodesReport.of_json(json.loads(json.dumps(report.as_json()))) == report
    socket.create_server(("", node_0.port)).close()  # torch's rendezvous needs the port afterwards


def test_what_differs_is_named_with_both_values(service, start):
    node_0 = service(3)
    start(node_0, 1, facts={"values": {"seed": 8}, "plugins": ["toy 1.0", "plots 1.0"]})
    start(node_0, 2, facts={"packages": {"torch": "0.1"}, "devices": {"kind": "cpu", "count": 2, "name": "CPU", "text": "CPU"}})
    report = checked(node_0)
    assert not report.works
    found = messages(report, "error")
    assert "seed is 8 on node 1 (host-1) and 7 on node 0 (first), node 2 (host-2)" in found
    assert "plugins differ on node 1 (host-1): it has plots 1.0" in found
    assert any(each.startswith("torch is 0.1 on node 2 (host-2) and ") for each in found)
    assert "number of devices is 2 on node 2 (host-2) and 1 on node 0 (first), node 1 (host-1)" in found
    titles, rows = report.table()
    assert titles == ["check", "most nodes", "node 1 (host-1)", "node 2 (host-2)"]
    assert ["plugins", "1 plugins", "2 plugins", ""] in rows


def test_another_directory_of_the_same_name_is_found(service, start, tmp_path):
    node_0 = service(2)
    (tmp_path / "other").mkdir()
    other = start(node_0, 1, folder=str(tmp_path / "other"))
    assert gather_nodes(node_0, 60, lambda waited, missing: None) == [1]
    [finding] = node_0.problems()
    assert "output_dir is not one directory" in finding.message
    assert "on node 1 (host-1)" in finding.message
    refused = ended(other)["refused"]
    assert refused["refused"]["message"] == finding.message


def test_another_version_is_refused_by_name(service, start):
    node_0 = service(2)
    start(node_0, 1, version="2")
    gather_nodes(node_0, 60, lambda waited, missing: None)
    assert [each.message for each in node_0.problems()] == ["smalti is 2 on node 1 (host-1) and 1 on node 0 (first)"]


def test_two_nodes_of_one_number_are_named_and_a_restarted_one_is_not(service, start):
    node_0 = service(3)
    first = start(node_0, 1)
    _until(lambda: 1 in node_0.members())
    first.kill()
    first.wait()
    start(node_0, 1, host="again")
    _until(lambda: node_0.members()[1].identity.host == "again")
    assert node_0.problems() == []
    start(node_0, 1, host="twice")
    _until(lambda: bool(node_0.problems()))
    assert [each.message for each in node_0.problems()] == ["--machine_rank=1 is given on again and on twice"]


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    compiler = ["gcc", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    try:
        subprocess.run(compiler, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs gcc: {error}")
    return folder / "clock.so"


def test_a_clock_that_is_ahead_is_a_warning_with_the_seconds(service, start, clock):
    node_0 = service(2)
    start(node_0, 1, environment={"LD_PRELOAD": str(clock), "CLOCK_AHEAD": "600"})
    report = checked(node_0)
    assert report.works
    [message] = messages(report)
    assert message.startswith("the clock of node 1 (host-1) is 600.0 s ahead of that of node 0 (first)")


def test_a_node_that_others_cannot_reach_is_named(service, start):
    node_0 = service(2, address="255.255.255.255")
    start(node_0, 1)
    report = checked(node_0)
    assert not report.works
    [message] = messages(report)
    assert message.startswith("node 1 (host-1) cannot connect to node 0 (first) at 255.255.255.255, port ")


def test_a_node_that_does_not_answer_is_named(service, start, monkeypatch):
    monkeypatch.setattr("smalti_cluster.checks.checks._ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("smalti_cluster.checks.checks.VISIBLE_SECONDS", 0.5)
    monkeypatch.setattr("smalti_cluster.checks.checks.CONNECT_SECONDS", 0.5)
    node_0 = service(2)
    other = start(node_0, 1)
    _until(lambda: 1 in node_0.members())
    other.kill()
    other.wait()
    report = checked(node_0)
    assert not report.works
    assert any("node 1 (host-1): the connection was lost" in each for each in messages(report))


def test_figures_are_compared_over_nodes_and_with_the_last_report(service, start, monkeypatch):
    monkeypatch.setattr("smalti_cluster.checks.checks._TRANSFER_SECONDS", 0.05)
    node_0 = service(3)
    for rank, speed in ((1, 1e14), (2, 5e13)):
        start(node_0, rank, speed=speed)
    report = checked(node_0, full=True)
    slower = "slower than the median of 3: bf16 products 50 TFLOP/s, median 100 TFLOP/s"
    assert f"cuda:0 of node 2 (host-2) (GPU) is 50 % {slower}" in messages(report, "warning")
    assert set(report.measured.links) == {"0-1", "1-2", "2-0"}
    assert all(rate > 0 for rate in report.measured.links.values())
    assert report.measured.devices["2"] == [measurement(5e13)]
    faster = {"links": {"0-1": 1e15}, "devices": {"1": [measurement(2e14)]}, "visible_seconds": None, "clocks": {}}
    last = NodesReport.of_json({**report.as_json(), "measured": faster})
    again = messages(check_nodes(node_0, bandwidth=True, devices=True, last=last), "warning")
    assert any(each.startswith("between node 0 (first) and node 1 (host-1): ") for each in again)
    assert any(each.startswith("cuda:0 of node 1 (host-1) (GPU) is 50 % slower than on ") for each in again)


def test_a_slow_node_is_the_one_that_is_slow_with_all_its_partners():
    for count in (3, 4, 5, 8, 9):
        for slow in range(count):
            pairs = [pair for each in rounds(count)["pairs"] for pair in each]
            rates = {pair: 10.0 if slow in pair else 100.0 for pair in pairs}
            assert {node for node, rate in best_rates(rates).items() if rate < 50} == {slow}
            assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in rounds(count)["pairs"])


def test_other_programs_at_the_port_change_nothing(service, start):
    node_0 = service(2)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\2{}", os.urandom(64)):
        with socket.create_connection(("127.0.0.1", node_0.port)) as other:
            other.sendall(data)
    start(node_0, 1)
    assert messages(checked(node_0)) == []


def test_a_port_that_is_in_use_is_refused(service, shared):
    with socket.create_server(("", 0)) as other:
        own = Identity(machine_rank=0, num_machines=2, host="first", version="1")
        with pytest.raises(PreflightError, match=r"^port \d+ of this node cannot be used"):
            Service(own, actions_of(shared, {}), address="127.0.0.1", port=other.getsockname()[1])
    assert list(shared.iterdir()) == []


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
