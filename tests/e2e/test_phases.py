"""A run is there from its first second: watched, stopped, refused to others, taken over while it scans, encodes and builds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smalti.checkpoint.format.store import CheckpointStore
from smalti.rundir.directory import RunDirectory
from support.forked_popen import run_forked
from support.whole import some

GATED = Path(__file__).parent / "gated"


def smalti(*words: object) -> subprocess.CompletedProcess:
    return run_forked([sys.executable, "-m", "smalti", *map(str, words)])


def latents(directory: Path) -> int:
    """How many images' latents a run has kept."""
    caches = json.loads(smalti("cache", "ls", f"--output_dir={directory}", "--json").stdout)["encodings"]
    return sum(cache["entries"] for cache in caches if cache["kind"] == "latents")


class Gate:
    """Where runs of the plugin in the folder `gated` stand still in a phase."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.file = folder / "gate"
        self.phase = phase
        path = os.pathsep.join(filter(None, (str(GATED), os.environ.get("PYTHONPATH"))))
        self.variables = {"PYTHONPATH": path, "GATE": str(self.file)}

    def close(self) -> None:
        self.file.write_text(self.phase)
        self.file.with_suffix(".reached").unlink(missing_ok=True)

    def wait(self, run) -> None:
        """Until the run stands there, and its heartbeat says so."""
        deadline, directory = time.monotonic() + 90, RunDirectory(run.directory)
        while (
            not self.file.with_suffix(".reached").exists()
            or (phase := directory.phase()) is None
            or phase.name != self.phase
            or (self.phase == "encoding" and not phase.done)
        ):
            assert run.process.poll() is None, run.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def options(tmp_path, pictures):
    """A run of few steps with that storage and that family."""
    entry = {"id": "pets", "type": "gated", "instance_data_dir": str(pictures), "resolution": 16}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    data = {"instance_data_dir": None, "data_backend_config": tmp_path / "data.json", "data_scan": "launcher"}
    return {**data, "model_family": "gated", "max_train_steps": 4}


def wait_until_listed(folder: Path, phase: str, ending: str) -> str:
    """How the run is listed; a heartbeat, which is up to a second old, may tell of the phase before."""
    deadline = time.monotonic() + 20
    while True:
        listed = smalti("run", "ls", folder).stdout.splitlines()[1]
        if (phase in listed and listed.endswith(ending)) or time.monotonic() > deadline:
            return listed
        time.sleep(0.2)


PHASES = [("scanning", 1, ""), ("encoding", 1, " images"), ("encoding", 2, " images"), ("building", 2, "")]


@pytest.mark.parametrize(("phase", "ranks", "ending"), some(PHASES, PHASES[0], PHASES[2]))
def test_in_every_phase_a_run_is_seen_refused_to_others_taken_over_and_stopped(
    tmp_path, start, train, options, phase, ranks, ending
):
    directory, gate = tmp_path / "run", Gate(tmp_path, phase)
    options |= {"num_processes": ranks, "train_batch_size": 4 // ranks}
    gate.close()
    killed = start(directory, **options, variables=gate.variables)
    gate.wait(killed)
    listed = wait_until_listed(tmp_path, phase, ending)
    second = train(directory, **options, variables=gate.variables)
    killed.kill()
    scans = gate.file.with_suffix(".scans").read_text().split()

    gate.close()
    stopped = start(directory, **options, variables=gate.variables)
    gate.wait(stopped)
    asked = smalti("run", "stop", directory)
    code, output = stopped.wait()
    status, kept = RunDirectory(directory).status(), latents(directory)

    gate.file.unlink()
    whole = train(directory, **options, variables=gate.variables)
    assert ("running" in listed, phase in listed, listed.endswith(ending)) == (True, True, True), listed
    assert (second.code, "is in use by a running process: process" in second.output) == (75, True), second.output
    assert scans == [str(killed.process.pid)]
    assert (asked.returncode, code, status.condition, status.exit_code) == (0, 7, "stopped", 7), asked.stderr + output
    assert "stopped on request before the first step" in output
    assert (kept > 0) == (phase in ("encoding", "building"))
    assert (whole.code, RunDirectory(directory).status().condition) == (0, "finished"), whole.output
    assert CheckpointStore(directory / "checkpoints").latest().name == "step-00000004"
