"""Runs that Ray's job server starts and stops, on a real cluster."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from smalti.rundir import RunDirectory
from support.ray_launches import words
from support.raylets import Raylets, environment
from support.whole import only_whole

SECONDS = 240


@pytest.fixture(scope="module")
def raylets(tmp_path_factory):
    pytest.importorskip("opencensus", reason="the job server needs ray[default]")
    cluster = Raylets(tmp_path_factory.mktemp("cluster"), dashboard=True)
    try:
        cluster.add()
        cluster.add()
        yield cluster
    finally:
        cluster.close()


class Jobs:
    """`ray job` for this cluster, and the command that `--dry-run` prints."""

    def __init__(self, raylets: Raylets, folder) -> None:
        self._variables = {**environment(), "RAY_API_SERVER_ADDRESS": raylets.jobs}
        self._folder = folder

    def _run(self, command, **options: bool) -> str:
        found = subprocess.run(
            command, **options, env=self._variables, cwd=self._folder, capture_output=True, text=True, timeout=SECONDS
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def submit(self, *flags: str, patience: int, **options: object) -> str:
        """Submit a launch whose driver has `patience` seconds to end after `ray job stop`; returns the job's id."""
        launch = [sys.executable, "-m", "smalti", "launch", "ray", *words(self._folder, "run", **options), *flags]
        printed = self._run([*launch, "--dry-run"]).strip()
        more = f"""--no-wait --runtime-env-json='{{"env_vars": {{"RAY_JOB_STOP_WAIT_TIME_S": "{patience}"}}}}' """
        found = re.search(r"raysubmit_\w+", self._run(printed.replace("ray job submit ", f"ray job submit {more}"), shell=True))
        assert found is not None
        return found[0]

    def stop(self, job: str) -> None:
        self._run(["ray", "job", "stop", job])

    def status(self, job: str) -> str:
        return self._run(["ray", "job", "status", job])

    def output(self, job: str) -> str:
        return self._run(["ray", "job", "logs", job])


def wait_for(condition, jobs: Jobs, job: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, jobs.output(job)
        time.sleep(0.2)


@only_whole("plugins/ray/tests/test_command.py::test_the_command_of_ray_jobs_starts_in_this_folder")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("patience", [30, 0])
def test_a_stopped_job_saves_and_the_next_one_resumes(raylets, tmp_path, patience):
    """Ray kills a driver that has not ended in time; its workers save then too."""
    jobs, run = Jobs(raylets, tmp_path), RunDirectory(tmp_path / "run")
    job = jobs.submit("--workers=2", patience=patience, max_train_steps=100_000, checkpoint_step_interval=0)
    wait_for(lambda: (last := run.latest("step")) is not None and (last.step or 0) > 1, jobs, job)
    jobs.stop(job)
    wait_for(lambda: run.status().ended, jobs, job)
    assert run.status().exit_code == 6, jobs.output(job)
    assert "was stopped" in jobs.status(job)
    assert ("ended with exit code 6" in jobs.output(job)) == bool(patience), jobs.output(job)
    last = run.latest("step")
    assert last is not None
    assert [each.name for each in run.checkpoints.glob("step-*")] == [f"step-{last.step:08d}"]

    further = last.step + 3
    job = jobs.submit("--workers=2", patience=patience, max_train_steps=further, checkpoint_step_interval=0)
    wait_for(lambda: re.search("succeeded|failed", jobs.status(job)), jobs, job)
    assert "succeeded" in jobs.status(job), jobs.output(job)
    assert (run.checkpoints / f"step-{further:08d}").exists()
