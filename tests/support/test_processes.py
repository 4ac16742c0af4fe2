import os
import signal
import subprocess
import sys

import psutil
import pytest

from support.processes import commands, lives, living, send_signal, workers

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


class EndsBetween(psutil.Process):
    """A process that ends after it has been listed and asked whether it runs."""

    def is_running(self) -> bool:
        running = super().is_running()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return running


@pytest.fixture
def three():
    """One that runs, a zombie, and one that is gone."""
    started = [subprocess.Popen(WAITS, stdin=subprocess.PIPE) for _ in range(3)]
    processes = [psutil.Process(each.pid) for each in started]
    for each in started[1:]:
        each.kill()
    os.waitid(os.P_PID, started[1].pid, os.WEXITED | os.WNOWAIT)
    started[2].wait()
    yield processes
    for each in started:
        each.kill()
        each.communicate()


def test_processes_that_have_ended_are_left_out(three):
    assert living(three) == three[:1]
    assert [lives(each.pid) for each in three] == [True, False, False]
    assert commands(three) == [(three[0], WAITS)]


def test_a_process_that_ends_while_it_is_asked_is_left_out():
    process = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    assert living([EndsBetween(process.pid)]) == []
    process.communicate()


def test_a_signal_reaches_the_others(three):
    send_signal(signal.SIGTERM, reversed(three))
    assert three[0].wait(60) == -signal.SIGTERM


def test_ranks_are_told_from_what_starts_them():
    code = f"""
import os, subprocess, sys
wait = {WAITS[-1]!r}
words = [["smalti.launch.worker"], ["smalti.launch.worker", "smalti.launch.agent"], ["other"]]
for rank, each in enumerate(words):
    subprocess.Popen([sys.executable, "-c", wait, *each], env={{**os.environ, "RANK": f"{{rank}}"}})
print(flush=True)
sys.stdin.read()"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        starter.stdout.readline()
        found = workers(starter.pid)
        starter.stdin.close()
    assert list(found) == [0]
