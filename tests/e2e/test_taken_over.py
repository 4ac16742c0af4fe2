"""A run whose directory another launch has taken over: all ranks stop, nothing more is written, and the exit code says so."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest

from smalti.rundir.directory import RunDirectory
from smalti.system.process import Process


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_taken_over_leaves_the_directory_as_it_is(tmp_path, start, ranks):
    run = start(
        tmp_path / "run",
        max_train_steps=100_000,
        train_batch_size=4,
        num_processes=ranks,
        checkpoint_step_interval=3,
        validation_prompt="circle number 1",
        validation_step_interval=4,
    )
    run.wait_for_step(3)
    directory = RunDirectory(tmp_path / "run")
    other = replace(Process.current(), host="other-host", pid_namespace="elsewhere")
    content = json.dumps({"process": asdict(other), "started": 1.0})
    directory.heartbeat_file.write_text(content)
    time.sleep(0.2)  # a rename may just be under way
    saved = sorted(directory.checkpoints.glob("step-*"))
    code, output = run.wait()
    assert code == 11, output
    assert "process " in output
    assert f"on other-host has taken over {directory.path}" in output
    assert "to resume" not in output
    assert directory.heartbeat_file.read_text() == content
    assert directory.status().condition != "stopped"
    assert [event.text("state") for event in directory.events() if event.kind == "state"] == ["starting", "running"]
    assert sorted(directory.checkpoints.glob("step-*")) == saved, "no checkpoint became visible"
