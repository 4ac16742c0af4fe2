"""The upload process as the run sees it: started with the loop, notified of new checkpoints, waited for at the end.

A training step never waits for it: it has memory, connections and failures of its own. Imports neither torch nor boto3.
"""

from __future__ import annotations

import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from smalti import UserError
from smalti.system import FOLDER_VARIABLE, load_json, note_progress

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER_VARIABLE)
_READY_SECONDS = 120.0
_POLL_SECONDS = 0.1


class UploadProcess:
    """The upload process of one launch. `command` is what a person types to upload the newest checkpoint."""

    def __init__(self, run: Path, arguments: Sequence[str]) -> None:
        self.command = shlex.join(["smalti", "mirror", "push", str(run), *arguments])
        self._arguments = ["mirror", "push", str(run), *arguments, "--watch"]
        self._messages: queue.SimpleQueue[Mapping[str, object]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._uploaded = ""

    def start(self) -> None:
        """Start it, and wait until it may write to the mirror.

        Raises UserError if it may not, because the mirror belongs to another run or cannot be reached.
        """
        self._spawn()
        until = time.monotonic() + _READY_SECONDS
        while time.monotonic() < until:
            message = self._take(_POLL_SECONDS)
            if message is not None and message["event"] == "ready":
                return
            if message is not None and message["event"] == "failed":
                self.stop()
                raise UserError(f"{message['message']}", fix=f"{message['fix']}")
            if message is None and (self._process is None or self._process.poll() is not None):
                break
        self.stop()
        raise UserError("the process that uploads checkpoints did not start", fix=f"see what this prints: {self.command}")

    def notify(self) -> None:
        """There is a new checkpoint. Starts the process again if it has died."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._spawn()
        self._send(b"\n")

    def failures(self) -> list[tuple[str, str]]:
        """What has failed since the last call, as (message, fix): not what has succeeded since."""
        found: list[tuple[str, str]] = []
        while (message := self._take(0)) is not None:
            if message["event"] == "uploaded":
                found = []
                self._uploaded = str(message["name"])
            elif message["event"] == "failed":
                found.append((str(message["message"]), str(message["fix"])))
        return found

    def finish(self, seconds: float) -> str:
        """Wait for the upload of the newest and the best, at most this long; returns the name of the last newest that arrived.

        Raises UserError if one of them did not arrive in the meantime.
        """
        process = self._process
        if process is None:
            return self._uploaded
        self._close_input()
        until, failures = time.monotonic() + seconds, self.failures()
        while process.poll() is None:
            if time.monotonic() > until:
                self.stop()
                raise UserError(f"the upload was not complete after {seconds:.0f} s and was ended", fix=self.command)
            time.sleep(_POLL_SECONDS)
            note_progress()
        self.stop()
        failures = self.failures() or failures
        if process.returncode != 0:
            message, fix = failures[-1] if failures else (f"the upload ended with status {process.returncode}", "")
            raise UserError(f"the newest or a best checkpoint is not in the mirror: {message}", fix=fix or self.command)
        return self._uploaded

    def stop(self) -> None:
        """End the process, and read the last that it has printed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdin is not None
        assert self._reader is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        self._reader.join()

    def _spawn(self) -> None:
        # A session of its own: a signal to the run ends the run, and this process uploads what was saved then.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smalti", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="smalti-mirror", daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with suppress(ValueError):  # a library has printed something
                    self._messages.put(load_json(line))

    def _take(self, seconds: float) -> Mapping[str, object] | None:
        try:
            return self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
        except queue.Empty:
            return None

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: the next checkpoint starts it again
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _close_input(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def _environment() -> dict[str, str]:
    """That of this process, without what makes it a rank."""
    return {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
