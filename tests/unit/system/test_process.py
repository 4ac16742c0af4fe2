"""Recognising a process: alive, ended, replaced by another one with the same number, or out of sight."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from smalti.system.process import Process


def test_this_process_is_alive() -> None:
    assert Process.current().alive() is True


def test_a_process_that_took_over_the_number_is_not_the_one_that_had_it() -> None:
    assert replace(Process.current(), start_time="1").alive() is False


def test_a_process_of_another_host_cannot_be_judged() -> None:
    assert replace(Process.current(), pid_namespace="elsewhere").alive() is None


def test_a_process_that_was_killed_is_dead_even_before_its_parent_looks() -> None:
    script = "from smalti.system.process import Process; print(repr(Process.current()), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        process = eval(child.stdout.readline())  # a repr of our own
        alive = process.alive()
        child.kill()
        while process.alive():
            pass
        assert (alive, child.returncode) == (True, None)
