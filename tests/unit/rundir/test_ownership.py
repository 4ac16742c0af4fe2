"""A launch that another one has taken over: it stops, and from then on nothing in the directory is from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from smalti.builtin.run_directory import Events
from smalti.checkpoint.format.store import CheckpointStore
from smalti.errors import ExitCode, TakenOverError
from smalti.rundir.directory import RunDirectory
from smalti.rundir.ownership import Ownership, abandon_saves, remove_dead_heartbeat
from smalti.rundir.writer import RunWriter, acquire, prepare
from smalti.system.process import Process
from smalti.types import RunState, StopReason

CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long skew(void) { const char *s = getenv("CLOCK_SKEW"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    int r = syscall(SYS_clock_gettime, id, t);
    if (!r && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += skew();
    return r;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec n; clock_gettime(CLOCK_REALTIME, &n); t->tv_sec = n.tv_sec; t->tv_usec = n.tv_nsec / 1000; return 0;
}
time_t time(time_t *t) { struct timespec n; clock_gettime(CLOCK_REALTIME, &n); if (t) *t = n.tv_sec; return n.tv_sec; }
"""
"""Another wall clock for one process. Monotonic clocks, sleeps and the times of files stay as they are."""

_NODE = """
import sys, time
from smalti.system import process
if sys.argv[2] != "here":
    process._pid_namespace = lambda: sys.argv[2]
from smalti.errors import UserError
from smalti.rundir import heartbeat, ownership, writer
ownership.STALE_SECONDS, ownership.LEASE_SECONDS, writer.BEAT_SECONDS = 1.0, 0.5, 0.1
from smalti.rundir.directory import RunDirectory
try:
    with writer.acquire(RunDirectory(sys.argv[1])) as owner:
        print("owner", time.time(), flush=True)
        while not owner.ownership.lost:
            owner.events.append("log", message=sys.argv[2])
            time.sleep(0.01)
    print("lost", flush=True)
except UserError as error:
    print("refused", error.exit_code, flush=True)
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("another clock for a process needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / "clock.so", folder / "clock.c"], check=True)
    return folder / "clock.so"


@contextmanager
def node(path: Path, name: str, clock: Path, skew: int) -> Iterator[subprocess.Popen[str]]:
    """A launch on another node, as far as processes and clocks are concerned."""
    environment = {**os.environ, "LD_PRELOAD": str(clock), "CLOCK_SKEW": str(skew)}
    command = [sys.executable, "-c", _NODE, str(path), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("skew", [600, -600])
def test_a_clock_that_differs_neither_takes_a_live_run_away_nor_keeps_a_dead_one(
    tmp_path: Path, clock: Path, skew: int
) -> None:
    with node(tmp_path, "first", clock, 0) as first:
        assert said(first).startswith("owner")
        with node(tmp_path, "second", clock, skew) as second:
            assert said(second) == f"refused {int(ExitCode.UNAVAILABLE)}"
        first.send_signal(signal.SIGSTOP)
        with node(tmp_path, "third", clock, skew) as third:
            _, clock_of_third = said(third).split()
            assert abs(float(clock_of_third) - time.time() - skew) < 100, "the other clock is in effect"
            before = RunDirectory(tmp_path).events_file.stat().st_size
            first.send_signal(signal.SIGCONT)
            assert said(first) == "lost"
            assert first.wait() == 0
            assert RunDirectory(tmp_path).heartbeat_file.exists(), "the heartbeat is that of the other run"
    written = RunDirectory(tmp_path).events_file.read_bytes()[before:]
    assert b"first" not in written


def taken_over(path: Path) -> None:
    """Make another launch, on another node, the owner."""
    directory = RunDirectory(path)
    record = directory.record()
    assert record is not None
    other = replace(Process.current(), host="other-host", pid_namespace="elsewhere")
    content = {"process": vars(other), "started": time.time() + 1000}
    directory.heartbeat_file.write_text(json.dumps(content))


def files(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def eventually_lost(writer: RunWriter) -> bool:
    deadline = time.monotonic() + 30
    while not writer.ownership.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    return writer.ownership.lost


def test_a_launch_that_was_taken_over_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 0.02)
    directory = RunDirectory(tmp_path)
    directory.path.mkdir(exist_ok=True)
    with acquire(directory) as writer:
        directory.next_of(directory.config_file).write_text("next = 1")
        taken_over(tmp_path)
        assert eventually_lost(writer)
        request = directory.request("save")
        before = files(tmp_path)
        writer.begin_training()
        writer.take_launch_files()
        writer.phases.enter("encoding", total=5)
        writer.events.append("step", step=1)
        assert writer.take_requests() == []
        writer.end(3, "finished", "done", ExitCode.DONE)
        writer.end_launch(ExitCode.FAILED, "no")
    assert files(tmp_path) == before
    assert (directory.control / f"{request.id}.json").exists(), "the request is one to the other run"


def test_a_launch_that_slept_longer_than_others_wait_looks_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 1000.0)
    monkeypatch.setattr("smalti.rundir.ownership.LEASE_SECONDS", 0.0)
    with acquire(RunDirectory(tmp_path)) as writer:
        taken_over(tmp_path)
        before = files(tmp_path)
        writer.events.append("step", step=1)
        assert files(tmp_path) == before


def test_a_launch_that_finds_its_place_empty_after_another_one_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 1000.0)
    with acquire(RunDirectory(tmp_path)) as writer:
        dead = RunDirectory(tmp_path).heartbeat()
        assert dead is not None
        remove_dead_heartbeat(RunDirectory(tmp_path), dead)
        acquire(RunDirectory(tmp_path)).close()
        writer._beat()
        assert writer.ownership.lost
        assert not RunDirectory(tmp_path).heartbeat_file.exists()


def test_a_heartbeat_that_is_just_being_written_is_not_that_of_another(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        directory.heartbeat_file.write_text("")
        assert writer.ownership.confirm()


def test_the_loop_is_asked_to_stop_without_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 0.02)
    state = RunState(max_steps=5)
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.begin_training()
        Events.stop_when_taken_over(writer, state)
        taken_over(tmp_path)
        assert eventually_lost(writer)
        assert (state.stop_reason, state.stop_reason.saves) == (StopReason.TAKEN_OVER, False)
        assert "on other-host has taken over" in state.stop_message
        assert state.stop_reason.exit_code == 11
        assert state.stop_reason == max(StopReason)


def test_before_the_first_step_the_launch_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 0.02)
    interrupted = threading.Event()
    with acquire(RunDirectory(tmp_path), on_stop=interrupted.set):
        taken_over(tmp_path)
        assert interrupted.wait(30)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_other_ranks_find_out_by_the_files(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)):
        rank = Ownership.of(RunDirectory(tmp_path))
        rank.check()
        RunDirectory(tmp_path).heartbeat_file.unlink()
        rank.check()  # its launch has ended, and nobody has taken over
        taken_over(tmp_path)
        with pytest.raises(TakenOverError, match=r"process \d+ on other-host has taken over .*, so nothing more is written"):
            rank.check()


def test_a_node_without_the_shared_directory_has_nothing_to_lose(tmp_path: Path) -> None:
    Ownership.of(RunDirectory(tmp_path)).check()


def test_what_was_being_saved_when_another_launch_began_never_becomes_visible(tmp_path: Path) -> None:
    prepare(RunDirectory(tmp_path))
    store = CheckpointStore(RunDirectory(tmp_path).checkpoints)
    with store.exclusive():
        partial = store.prepare(7)
    abandon_saves(RunDirectory(tmp_path))
    assert not partial.exists()
    with store.exclusive():  # which clears what is left
        assert [path.name for path in store.root.iterdir() if path.is_dir()] == []
