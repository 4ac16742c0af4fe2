"""What the nodes of a launch agree on before their ranks start. Each thread is a node; the run directory is what they share."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from smalti.errors import ConfigError, ExitCode, PreflightError, UserError
from smalti.plugins import Plugins
from smalti.rundir import RunDirectory, RunWriter, acquire, read_events
from smalti_cluster.checks.preflight import check_separate_nodes
from smalti_cluster.nodes.nodes import Nodes, wait_for_node_0

FLAGS = ("--num_processes=3", "--num_machines=3", "--main_process_ip=127.0.0.1", "--learning_rate=0.001", "--use_cpu")


@pytest.fixture(scope="module")
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"--main_process_port={probe.getsockname()[1]}"


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def node(directory, configure, plugins, port) -> Iterator[Callable[..., Nodes]]:
    """node(1, "--flag", ...) -> that node of three, as its own process sees them."""
    made = []

    def make(rank: int, *flags: str, directory: RunDirectory = directory, plugins: Plugins = plugins) -> Nodes:
        made.append(Nodes(directory, configure(*FLAGS, port, f"--machine_rank={rank}", *flags), plugins))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def together():
    """together(call, ...) -> the calls, which run at the same time."""
    with ThreadPoolExecutor(4) as pool:
        yield lambda *calls: [pool.submit(call) for call in calls]


def begun(directory: RunDirectory, first: Nodes) -> RunWriter:
    writer = acquire(directory)
    assert writer.record.started is not None
    first.begin(writer.record.started)
    return writer


def ends(nodes: list[Future[None]]) -> list[BaseException | None]:
    return [each.exception(60) for each in nodes]


def test_nodes_start_when_all_are_there_in_whatever_order_they_come(directory, node, together):
    first = node(0)
    joining = together(node(2).join)
    with begun(directory, first):
        gathering = together(first.gather)
        time.sleep(0.3)
        assert not gathering[0].done()
        assert not joining[0].done()
        assert ends([*gathering, *joining, *together(node(1).join)]) == [None, None, None]


def test_what_differs_is_named_on_both_nodes_with_both_values(directory, node, together):
    first = node(0)
    with begun(directory, first):
        found = ends(together(first.gather, node(1, "--learning_rate=0.002", "--seed=7").join))
    for error in found:
        assert isinstance(error, ConfigError)
        assert error.exit_code is ExitCode.USAGE
        assert [problem.option for problem in error.problems] == ["learning_rate", "seed"]
        assert "learning_rate is 0.002 on node 1" in error.problems[0].message
        assert "and 0.001 on node 0" in error.problems[0].message


def test_of_other_plugins_only_the_difference_is_named(directory, node, together):
    first = node(0)
    bare = node(1, plugins=Plugins())
    with begun(directory, first):
        for error in ends(together(first.gather, bare.join)):
            assert isinstance(error, ConfigError)
            assert "is on node 0" in error.problems[0].message
            assert "not on node 1" in error.problems[0].message


def test_a_difference_ends_the_scan_of_node_0(directory, node, together, monkeypatch):
    monkeypatch.setattr("smalti_cluster.nodes.nodes._CHECK_SECONDS", 0)
    first, done = node(0), []
    advance = first.checked(lambda number, total: done.append(number))
    with begun(directory, first):
        advance(1, None)
        assert ends(together(node(1, "--seed=7").join)) != [None]
        with pytest.raises(ConfigError, match="seed is 7 on node 1"):
            advance(2, None)
    assert done == [1]


def test_a_node_that_does_not_come_is_named(directory, node, together):
    first = node(0, "--rendezvous_timeout=4")
    with begun(directory, first):
        gathering, _ = together(first.gather, node(1, "--rendezvous_timeout=4").join)
        with pytest.raises(PreflightError, match=r"^node 2 did not start within 4 s") as refused:
            gathering.result(60)
    assert "--machine_rank=2" in refused.value.fix


def test_the_others_end_as_node_0_does(directory, node, together):
    first = node(0)
    with begun(directory, first) as writer:
        joining = together(node(1).join)
        while not (directory.path / "nodes" / "node-1.json").exists():
            time.sleep(0.01)
        writer.end_launch(ExitCode.PREFLIGHT, "no image was found")
    [error] = ends(joining)
    assert isinstance(error, UserError)
    assert (error.exit_code, "node 0 has ended: no image was found" in error.message) == (ExitCode.PREFLIGHT, True)


def test_two_nodes_of_one_number_do_not_start(directory, node, together):
    first = node(0)
    with begun(directory, first):
        one = together(node(1).join)
        while not (directory.path / "nodes" / "node-1.json").exists():
            time.sleep(0.01)
        node(1).announce(json.loads((directory.path / "nodes" / "node-0.json").read_text())["attempt"])
        [error] = ends(one)
    assert isinstance(error, PreflightError)
    assert "has started with the --machine_rank of this node" in error.message


def test_a_second_node_0_ends_with_the_host_that_has_this_number_and_the_first_goes_on_waiting(
    directory, node, together, monkeypatch, capsys
):
    monkeypatch.setattr("smalti_cluster.nodes.nodes._TAKEN_SECONDS", 0.3)
    first, second = node(0), node(0, "--seed=7")
    second.refuse_second()  # nobody is node 0
    with begun(directory, first):
        first.refuse_second()
        gathering = together(first.gather)
        [refused] = ends(together(second.refuse_second))
        assert isinstance(refused, ConfigError)
        assert refused.exit_code is ExitCode.USAGE
        assert refused.problems[0].message.startswith(f"--machine_rank=0 is taken by {first._own.host}, which waits")
        assert ends([*gathering, *together(node(1).join, node(2).join)]) == [None, None, None]
        node(0).refuse_second()  # the launch is complete: its directory is in use
    said = capsys.readouterr().err
    assert said.count("was started with --machine_rank=0 too") == 1
    assert second._own.host in said
    assert not list((directory.path / "nodes").glob("refused-*"))


def test_what_an_earlier_launch_has_left_counts_for_nothing(directory, node, together):
    earlier = node(0)
    with begun(directory, earlier):
        assert ends(together(earlier.gather, node(1).join, node(2).join)) == [None, None, None]
    late = together(node(1, "--rendezvous_timeout=1").join)
    with pytest.raises(PreflightError, match="did not create the run directory"):
        wait_for_node_0(directory, 0.5)
    assert isinstance(ends(late)[0], PreflightError)
    first = node(0)
    with begun(directory, first):
        assert ends(together(first.gather, node(1).join, node(2).join)) == [None, None, None]


def test_a_node_with_another_directory_of_that_name_is_named_on_both(directory, node, together, tmp_path):
    other = RunDirectory(tmp_path / "other")
    first = node(0)
    with begun(directory, first):
        found = ends(together(first.gather, node(1, directory=other).wait_for_node_0))
    for error in found:
        assert isinstance(error, PreflightError)
        assert error.message.startswith(f"output_dir is not one directory: {other.path} on ")
        assert f"{directory.path} on" in error.message


def test_a_node_that_cannot_connect_to_node_0_is_named_on_both(directory, node, together, monkeypatch):
    monkeypatch.setattr("smalti_cluster.checks.preflight._UNREACHABLE_SECONDS", 0.3)
    first = node(0)
    with begun(directory, first), socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        lost = node(1)
        lost._checks._port = unused.getsockname()[1]
        found = ends(together(first.gather, lost.join))
    for error in found:
        assert isinstance(error, PreflightError)
        assert re.match(r"node 1 \(.*\) cannot connect to node 0 at 127.0.0.1, port \d+: Connection refused", error.message)


def test_the_report_is_kept_and_an_event(directory, node, together):
    first = node(0)
    with begun(directory, first) as writer:
        assert ends(together(lambda: first.gather(writer.events), node(1).join, node(2).join)) == [None, None, None]
    report = json.loads((directory.path / "nodes" / "preflight.json").read_text())
    [event] = [each for each in read_events(directory.events_file) if "preflight" in each.fields]
    assert report["works"]
    assert event.fields["preflight"] == report
    assert event.text("message").startswith("preflight of 3 nodes: the nodes agree")
    assert not list((directory.path / "nodes").glob(".nodes-*"))


def test_without_a_preflight_nothing_listens(directory, node, together, port):
    first = node(0, "--preflight=off")
    with begun(directory, first):
        socket.create_server(("", int(port.partition("=")[2]))).close()
        off = [node(rank, "--preflight=off").join for rank in (1, 2)]
        assert ends(together(first.gather, *off)) == [None, None, None]
    assert not (directory.path / "nodes" / "preflight.json").exists()


def test_missing_nodes_are_named_with_their_last_hosts_again_and_again(directory, node, together, monkeypatch, capsys):
    monkeypatch.setattr("smalti_cluster.checks.preflight.SAY_SECONDS", 0.2)
    monkeypatch.setattr("smalti_cluster.checks.preflight.REPEAT_SECONDS", 0.3)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu-[15-17]")
    first = node(0, "--rendezvous_timeout=6")
    with begun(directory, first):
        gathering, _ = together(first.gather, node(1, "--rendezvous_timeout=6").join)
        with pytest.raises(PreflightError, match=r"^node 2 \(gpu-17\) did not start within 6 s"):
            gathering.result(60)
    waits = [line for line in capsys.readouterr().err.splitlines() if "waiting for node 2 (gpu-17), for " in line]
    assert len(waits) > 3
    assert "present: node 0 (" in waits[-1]
    assert ", node 1 (" in waits[-1]


@pytest.fixture
def separate(tmp_path, configure, plugins, port):
    """separate(1, "--flag") -> the preflight of that node of two, which has its own directory."""
    flags = ("--num_processes=2", "--num_machines=2", "--main_process_ip=127.0.0.1", "--no_shared_output_dir", port)

    def check(rank: int, *more: str) -> Callable[[], None]:
        (tmp_path / f"{rank}").mkdir(exist_ok=True)
        config = configure(*flags, f"--machine_rank={rank}", f"--output_dir={tmp_path}/{rank}", *more)
        return lambda: check_separate_nodes(tmp_path / f"{rank}", config, plugins, "cpu", None)

    return check


def test_nodes_with_directories_of_their_own_are_compared_too(separate, together, tmp_path):
    assert ends(together(separate(0), separate(1))) == [None, None]
    report = json.loads((tmp_path / "0" / "nodes" / "preflight.json").read_text())
    assert (report["works"], report["measured"]["visible_seconds"]) == (True, None)
    for error in ends(together(separate(0), separate(1, "--seed=7"))):
        assert isinstance(error, PreflightError)
        assert error.message.startswith("seed is 7 on node 1 (")


def test_a_node_with_a_directory_of_its_own_waits_for_the_others_no_longer_than_it_may(separate, together):
    for rank, message in ((0, "node 1 did not start within 1 s"), (1, "cannot connect to node 0 at 127.0.0.1")):
        [error] = ends(together(separate(rank, "--rendezvous_timeout=1")))
        assert isinstance(error, PreflightError)
        assert message in error.message
