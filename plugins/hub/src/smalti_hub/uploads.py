"""Uploads of a run that is training, each in a process of its own: `smalti hub push RUN --step=N`.

A step never waits for an upload, and a failed upload does not affect the run. One upload runs at a time. A checkpoint that is
saved meanwhile is uploaded next, unless a newer one was saved by then.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from smalti import UserError
from smalti.system import FOLDER_VARIABLE
from smalti_hub.publish import FOLDER, LOG

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER_VARIABLE)
_POLL_SECONDS = 0.2


class Uploads:
    """The uploads of one run, started by its main rank."""

    def __init__(self, directory: Path, repository: str, *, private: bool) -> None:
        self._directory = directory
        self._options = [f"--to={repository}", *([] if private else ["--public"])]
        self._process: subprocess.Popen[bytes] | None = None
        self._running: int | None = None
        self._waiting: int | None = None

    @property
    def command(self) -> str:
        """What to type to publish the newest checkpoint."""
        return shlex.join(["smalti", "hub", "push", str(self._directory), *self._options])

    def add(self, step: int) -> None:
        """Upload the checkpoint of a step, after the upload that is running."""
        self._waiting = step
        self.advance()

    def advance(self) -> None:
        """Start what is waiting if nothing is running. Raises UserError for an upload that has failed."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            step, self._process, self._running = self._running, None, None
            if code != 0:
                waiting, self._waiting = self._waiting, None
                self._start(waiting)
                raise self._failure(step, code)
        waiting, self._waiting = self._waiting, None
        self._start(waiting)

    def finish(self, seconds: float) -> None:
        """Wait for all uploads, at most this long. Raises UserError if one failed or is not complete by then."""
        until = time.monotonic() + seconds
        failure: UserError | None = None
        while self._process is not None or self._waiting is not None:
            try:
                self.advance()
            except UserError as error:
                failure = error
            if self._process is None:
                break
            if time.monotonic() > until:
                self.stop()
                raise UserError(f"the upload was not complete after {seconds:.0f} s and was ended", fix=self.command)
            time.sleep(_POLL_SECONDS)
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """End the upload that is running, if there is one."""
        self._waiting = None
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._running = None

    def _start(self, step: int | None) -> None:
        if step is None:
            return
        folder = self._directory / FOLDER
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "smalti", "hub", "push", str(self._directory), f"--step={step}", *self._options]
        with (folder / LOG).open("ab") as log:
            # A session of its own: Ctrl-C is for the run, which ends the upload itself.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), start_new_session=True
            )
        self._running = step

    def _failure(self, step: int | None, code: int) -> UserError:
        log = self._directory / FOLDER / LOG
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        reason = next((line for line in reversed(lines) if "error" in line), f"exit code {code}")
        return UserError(f"the upload of step {step} failed: {reason} (all of it: {log})", fix=self.command)


def _environment() -> dict[str, str]:
    """That of this process, without what makes it a rank, and without accelerators: exports are made on the CPU."""
    found = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    return found | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
