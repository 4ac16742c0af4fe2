"""The process that starts the ranks, begun early: it imports torch while the launch is still being checked.

Without a word from this process it does nothing, and ends with it: the line between them closes, however this process ends.
Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from smalti.config import Config, LaunchOptions
from smalti.launch.agent import STAND_BY
from smalti.system import PARENT_VARIABLE

AGENT = "smalti.launch.agent"


class StandbyLauncher:
    """A `smalti.launch.agent` that waits to be told what to run."""

    def __init__(self) -> None:
        reading, self._line = os.pipe()
        command = (sys.executable, "-m", AGENT, f"{STAND_BY}{reading}")
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        try:
            self._process = subprocess.Popen(command, env=environment, pass_fds=(reading,), start_new_session=True)
        except BaseException:
            os.close(self._line)
            raise
        finally:
            os.close(reading)
        self._told = False

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let it do what `python -m WORDS` does in this environment; from now on it is the caller's. None if it has ended."""
        if self._told or self._process.poll() is not None:
            return None
        self._told = True
        with suppress(BrokenPipeError), os.fdopen(self._line, "w", encoding="ascii") as line:
            line.write(json.dumps({"words": list(words), "environment": dict(environment)}) + "\n")
        return self._process

    def close(self) -> None:
        """End it, unless it was told to start."""
        if not self._told:
            self._told = True
            os.close(self._line)
            self._process.kill()
            self._process.wait()


@contextmanager
def standby_launcher(config: Config) -> Iterator[StandbyLauncher | None]:
    """For the launch of several ranks; None for one, which needs no other process."""
    if config[LaunchOptions].num_processes == 1:
        yield None
        return
    standby = StandbyLauncher()
    try:
        yield standby
    finally:
        standby.close()
