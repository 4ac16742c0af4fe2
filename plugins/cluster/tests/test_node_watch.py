"""How the agents of a launch notice that a node is lost, and what its ranks make of that."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from smalti.parallel.failure_detection import FailureDetector
from smalti.parallel.rank_boards import StatusBoard
from smalti.system import LostPeers, Process, read_lost_peers, write_lost_peers
from smalti.system.exit_reports import FOLDER_VARIABLE
from smalti_cluster.nodes.node_watch import FIX, NodeWatch
from support.forked_ranks import forked_processes

TIMEOUT = 1.0
INTERVAL = 0.05
BROKEN = RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234. More advice")


def lost_when(found) -> LostPeers:
    """What is known as soon as this is true."""
    while not found(peers := read_lost_peers()):
        time.sleep(INTERVAL)
    return peers


def watch(node: int, nodes: int = 2) -> NodeWatch:
    """Of a node whose agent uses the store of this process group."""
    started = NodeWatch(dist.group.WORLD.get_group_store(), node, nodes, TIMEOUT, interval=INTERVAL)
    started.start()
    return started


def lose_node_1(folder: Path) -> tuple[LostPeers, LostPeers]:
    """Rank 0 has the store, and is node 0. Returns what it knows before and after node 1 is silent."""
    os.environ[FOLDER_VARIABLE] = str(folder / str(dist.get_rank()))
    Path(os.environ[FOLDER_VARIABLE]).mkdir(parents=True)
    mine = watch(dist.get_rank())
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        mine.publish_killed({3: "SIGKILL"})
        time.sleep(4 * TIMEOUT)
        mine.ended.set()
        return read_lost_peers(), read_lost_peers()
    before = lost_when(lambda peers: peers.ranks)
    os.kill(pids[1], signal.SIGSTOP)
    after = lost_when(lambda peers: peers.nodes)
    os.kill(pids[1], signal.SIGCONT)
    mine.ended.set()
    return before, after


def lose_the_store(folder: Path) -> LostPeers:
    """What node 1 knows after the process with the store was stopped."""
    os.environ[FOLDER_VARIABLE] = str(folder / str(dist.get_rank()))
    Path(os.environ[FOLDER_VARIABLE]).mkdir(parents=True)
    mine = watch(dist.get_rank())
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        time.sleep(4 * TIMEOUT)
        mine.ended.set()
        return read_lost_peers()
    time.sleep(5 * INTERVAL)
    os.kill(pids[0], signal.SIGSTOP)
    after = lost_when(lambda peers: peers.nodes)
    os.kill(pids[0], signal.SIGCONT)
    mine.ended.set()
    return after


def test_a_node_that_shows_no_sign_of_life_is_lost_and_one_that_does_is_not(tmp_path):
    with forked_processes() as pair:
        before, after = pair.run(lose_node_1, tmp_path)[0]
    host = os.uname().nodename
    assert before == LostPeers(ranks={3: f"was killed by SIGKILL on {host}"})
    assert after == LostPeers(nodes={1: f"node 1 ({host}) has shown no sign of life for 1 s"}, ranks=before.ranks)


def test_node_0_is_lost_to_the_others_when_the_store_does_not_answer(tmp_path):
    with forked_processes() as pair:
        nodes = pair.run(lose_the_store, tmp_path)[1].nodes
    assert nodes == {0: f"node 0 ({os.uname().nodename}) has shown no sign of life for 1 s"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def far_away(pid: int) -> Process:
    return Process(pid=pid, host="far", pid_namespace="another", start_time="")


def detector(processes: tuple[Process, ...], rank: int, store: dist.Store) -> FailureDetector:
    return FailureDetector(processes=processes, local_size=2, rank=rank, board=StatusBoard(store, rank), timeout=600)


@pytest.mark.usefixtures("folder")
def test_ranks_of_a_lost_node_and_killed_ones_are_gone_and_nobody_waits_for_them():
    here, store = Process.current(), dist.HashStore()
    mine = detector((here, far_away(2), far_away(4), far_away(5)), 0, store)
    assert mine.gone() == []
    write_lost_peers(
        LostPeers(nodes={1: "node 1 (far) has shown no sign of life for 20 s"}, ranks={1: "was killed by SIGKILL"}, fix=FIX)
    )
    statuses = mine.diagnose(BROKEN, state_consistent=True)
    assert (statuses.gone, statuses.saver) == ((1, 2, 3), 0)
    told = mine.explain(statuses, BROKEN)
    node, rank = "node 1 (far) has shown no sign of life for 20 s (ranks 2, 3)", f"rank 1 ({far_away(2)}) was killed by SIGKILL"
    assert told.message.startswith(f"{node}; {rank}, so this rank cannot continue")
    assert told.fix == FIX


@pytest.mark.usefixtures("folder")
def test_a_store_that_was_lost_with_node_0_is_not_asked():
    store = dist.HashStore()
    StatusBoard(store, 0).alarm()
    mine = detector((far_away(1), far_away(2), Process.current(), far_away(4)), 2, store)
    write_lost_peers(LostPeers(nodes={0: "node 0 (far) has shown no sign of life for 20 s"}))
    assert mine.board.alarmed() is None
    statuses = mine.diagnose(BROKEN, state_consistent=True)
    assert (statuses.gone, statuses.saver) == ((0, 1), 2), "rank 3 is not waited for: it cannot be heard"
    assert StatusBoard(store, 2).posted(4) == {}
