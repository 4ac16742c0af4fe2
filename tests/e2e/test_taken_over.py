"""A run whose directory another launch has taken over: all ranks stop, nothing more is written, and the exit code says so."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from smalti.rundir.directory import RunDirectory
from smalti.system.process import Process

ENDLESS = {"max_train_steps": 100_000}


def take_over(directory: RunDirectory) -> str:
    """Another launch owns the directory from now on. Returns its heartbeat. The run is asked to save before it knows."""
    other = replace(Process.current(), host="other-host", pid_namespace="elsewhere")
    content = json.dumps({"process": asdict(other), "started": 1.0})
    directory.heartbeat_file.write_text(content)
    directory.request("save")
    return content


def is_left_alone(directory: RunDirectory, content: str) -> bool:
    states = {event.text("state") for event in directory.events() if event.kind == "state"}
    saved = list(directory.checkpoints.glob("step-*"))
    return not saved and directory.heartbeat_file.read_text() == content and states == {"starting", "running"}


def test_a_run_that_was_taken_over_leaves_the_directory_as_it_is(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, train_batch_size=4)
    run.wait_for_step(3)
    directory = RunDirectory(tmp_path / "run")
    content = take_over(directory)
    code, output = run.wait()
    assert code == 11, output
    assert f"on other-host has taken over {directory.path}" in output
    assert "to resume" not in output
    assert is_left_alone(directory, content)


def test_all_ranks_stop(tmp_path, train):
    directory = RunDirectory(tmp_path / "run")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(train, directory.path, **ENDLESS, train_batch_size=2, num_processes=2)
        while (last := directory.latest("step")) is None or (last.step or 0) < 3:
            assert not running.done(), running.result()
            time.sleep(0.05)
        content = take_over(directory)
        run = running.result()
    assert run.code == 11, run.output
    assert is_left_alone(directory, content)
