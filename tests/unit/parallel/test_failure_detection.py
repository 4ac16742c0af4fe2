"""Diagnosis after a failure: which ranks are gone, hang or have failed, and which one saves, as the remaining ranks see it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace

import psutil
import pytest
import torch.distributed as dist

from smalti.config.resolution import resolve
from smalti.errors import ExitCode, GpuFaultError
from smalti.parallel.collective import Boundary
from smalti.parallel.failure_detection import Claim, FailureDetector, RankStatuses, in_a_line
from smalti.parallel.gloo import BrokenGroupError, GlooCommunicator, break_connections, break_group, is_connection_error
from smalti.parallel.process_group import ReplicatedParallel
from smalti.parallel.rank_boards import RankStatus, StatusBoard
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.system.process import Process
from smalti.types import World
from support.forked_ranks import forked_processes

WHO = """import json, sys, time
from contextlib import nullcontext
from dataclasses import asdict
from smalti.system.process import Process
print(json.dumps(asdict(Process.current())), flush=True)
time.sleep(float(sys.argv[1]))"""
BROKEN = RuntimeError(
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer. This is typical.\nmore"
)


@pytest.fixture(scope="module")
def gone() -> Process:
    return Process(**json.loads(subprocess.run([sys.executable, "-c", WHO, "0"], capture_output=True, check=True).stdout))


@pytest.fixture
def other():
    """Another process, which lives."""
    process = subprocess.Popen([sys.executable, "-c", WHO, "600"], stdout=subprocess.PIPE)
    yield Process(**json.loads(process.stdout.readline()))
    process.kill()
    process.communicate()


@pytest.fixture
def store():
    return dist.HashStore()


def detector(store, *others: Process, timeout: float = 0.2) -> FailureDetector:
    """As rank 0 knows it."""
    return FailureDetector(processes=(Process.current(), *others), rank=0, board=StatusBoard(store, 0), timeout=timeout)


def called(store, *others: Process) -> tuple[RankStatuses, str]:
    """The statuses, and the message about them."""
    mine = detector(store, *others)
    statuses = mine.diagnose(BROKEN, state_consistent=True)
    return statuses, mine.explain(statuses, BROKEN).message


def test_a_rank_whose_process_ended_is_named_with_what_was_noticed(store, gone):
    _, told = called(store, gone)
    assert told == f"rank 1 ({gone}) is gone, so this rank cannot continue; detected by RuntimeError: Connection closed by peer"


def test_a_rank_whose_process_is_stopped_is_named_at_once(store, other):
    os.kill(other.pid, signal.SIGSTOP)
    while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    _, told = called(store, other)
    assert f"rank 1 ({other}) did not answer: it is stopped" in told


def test_a_rank_that_does_not_answer_in_time_is_named_with_what_its_process_does(store, other):
    _, told = called(store, other)
    assert f"rank 1 ({other}) did not answer within 0.2 s (it is sleeping)" in told


def test_a_rank_that_failed_is_named_with_its_failure(store, other):
    StatusBoard(store, 1).post(RankStatus(failure="ValueError: bad"))
    _, told = called(store, other)
    assert f"rank 1 ({other}) failed (ValueError: bad)" in told


def test_every_node_ends_with_the_exit_code_of_the_rank_that_failed_and_with_that_of_a_lost_one_if_none_did(store, other):
    mine = detector(store, other)
    lost = mine.explain(mine.diagnose(BROKEN), BROKEN)
    StatusBoard(store, 1).post(RankStatus(failure="GpuFaultError: bad", code=ExitCode.GPU_FAULT))
    mine = detector(store, other)
    told = mine.explain(mine.diagnose(BROKEN), BROKEN)
    assert [lost.exit_code, told.exit_code] == [ExitCode.KILLED, ExitCode.GPU_FAULT]


def test_when_all_answer_it_is_the_connections(store, other):
    StatusBoard(store, 1).post(RankStatus(state_consistent=True))
    _, told = called(store, other)
    assert "all ranks respond, but the connections between them broke" in told


def test_the_lowest_rank_with_a_whole_state_saves():
    assert (
        RankStatuses(
            posted={
                0: RankStatus(failure="x", state_consistent=True),
                1: RankStatus(),
                2: RankStatus(state_consistent=True),
                3: RankStatus(state_consistent=True),
            }
        ).saver
        == 2
    )
    assert RankStatuses(posted={0: RankStatus(failure="x"), 1: RankStatus(failure="x", state_consistent=True)}).saver == 1
    assert (
        RankStatuses(posted={0: RankStatus(failure="x"), 1: RankStatus(failure="x", state_consistent=True)}, gone=(2,)).saver
        is None
    )


def test_a_failure_of_its_own_is_nobody_elses_end_and_is_told_to_the_others(store, other):
    assert detector(store, other).diagnose(GpuFaultError("mine"), suspect=True) is None
    assert StatusBoard(store, 1).posted(2) == {
        0: RankStatus(failure="GpuFaultError: mine", code=ExitCode.GPU_FAULT, suspect=True)
    }


def test_the_first_word_of_a_rank_counts(store):
    for failure in ("first", "second"):
        StatusBoard(store, 0).post(RankStatus(failure=failure))
    assert StatusBoard(store, 1).posted(1)[0].failure == "first"


def test_whatever_a_rank_posts_lets_all_know_that_one_is_lost(store):
    assert StatusBoard(store, 1).alarmed() is False
    StatusBoard(store, 0).post(RankStatus(failure="first"))
    assert StatusBoard(store, 1).alarmed() is True


def test_no_change_of_the_weights_begins_once_a_rank_is_known_to_be_lost():
    boundary = Boundary(claim := Claim(), "cpu")
    boundary.leave()
    claim.freeze("rank 1 is gone")
    boundary.reach()
    with pytest.raises(BrokenGroupError, match="rank 1 is gone") as refusal:
        boundary.leave()
    assert boundary.state_consistent
    assert is_connection_error(refusal.value)


def test_one_thread_of_a_process_answers_for_the_rank(store, gone):
    mine = detector(store, gone)
    assert mine.diagnose(BROKEN, state_consistent=True) is not None
    other = threading.Thread(target=mine.diagnose, args=(BROKEN,), daemon=True)
    other.start()
    other.join(0.5)
    assert other.is_alive()
    assert mine.diagnose(BROKEN) is not None


def test_a_single_process_has_nobody_to_ask():
    assert FailureDetector(processes=(Process.current(),)).lost_rank(BROKEN) is None


def test_without_the_board_a_rank_looks_around_by_itself(gone):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    statuses, _ = called(client, gone)
    assert (statuses.saver, statuses.gone) == (0, (1,))


def test_a_hanging_rank_is_ended_and_a_slow_one_beside_a_dead_one_is_not(store, gone, other):
    slow = detector(store, gone, other)
    assert slow.end_hanging(slow.diagnose(BROKEN)) == ()
    hangs = detector(store, other)
    statuses = hangs.diagnose(BROKEN)
    assert replace(hangs, timeout=10.0).end_hanging(statuses) == (1,)
    assert other.alive() is False


def test_everybody_learns_of_every_process():
    class Two:
        world = World()

        def all_gather_text(self, value):
            return [value, value]

    assert asdict(FailureDetector.create(Two()).processes[1]) == asdict(Process.current())


# --- real lines -----------------------------------------------------------------------------------------------------


def hung_up() -> tuple[float, bool, str]:
    """Rank 1 hangs up; how long rank 0 waited in the group, whether it knows why, and what it says."""
    group = dist.new_group(backend="gloo")
    communicator = GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=group)
    communicator.barrier()
    started = time.monotonic()
    if dist.get_rank() == 1:
        communicator.abort()
    try:
        communicator.barrier()
    except RuntimeError as error:
        return time.monotonic() - started, is_connection_error(error), in_a_line(error)
    return 0.0, False, ""


def test_who_waits_for_a_rank_that_hangs_up_learns_of_it_at_once():
    with forked_processes() as pair:
        waited, known, told = pair.run(hung_up)[0]
    assert waited < 20
    assert known, told
    assert "[" not in told.partition(":")[0]


class Replica(ReplicatedParallel):
    def accumulate(self, last):
        return nullcontext()


def two_lines() -> tuple[list[str], bool]:
    """In a group as it is on accelerators, gloo beside another backend: rank 1 diagnoses while rank 0 waits on each backend.

    On rank 0 what it learned of each of them, and whether rank 1 was found.
    """
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group("cpu:gloo,cuda:fake")
    group = Replica(resolve(schema_of(load_plugins(Selection(without=("all",)))), [], environment={}))
    side, pair = group.background_communicator(), dist.new_group([0, 1])
    detector = FailureDetector.create(group)
    if dist.get_rank() == 1:
        break_group(5)
        statuses = detector.diagnose(BROKEN)
        time.sleep(5)  # the process lives on: its end would tell the other one, too
        return [], statuses.silent == {}
    waits = (lambda: group.all_reduce_max(0), side.barrier, lambda: dist.all_reduce(torch.zeros(1)))
    waits += (lambda: dist.all_reduce(torch.zeros(1), group=pair),)
    told = []
    for wait in waits:
        try:
            wait()
            told.append("")
        except RuntimeError as error:
            told.append(in_a_line(error) if is_connection_error(error) else "")
            if len(told) == 1:
                statuses = detector.diagnose(error)
    return told, all(process.alive() for process in detector.processes) and statuses.silent == {}


def test_beside_an_accelerators_backend_every_line_over_gloo_is_hung_up():
    with forked_processes(group=False) as both:
        (told, found), (_, heard) = both.run(two_lines)
    assert all(told)
    assert (found, heard) == (True, True)


def test_hanging_up_where_there_is_no_group_does_nothing():
    assert break_connections(None) is None
