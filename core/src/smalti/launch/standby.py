"""The process that starts the ranks, created early: it imports torch while the launch is still being checked.

It waits for a command on a pipe. If this process ends, the pipe closes and it ends too. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from smalti.launch.agent import STAND_BY
from smalti.system import PARENT_VARIABLE

AGENT = "smalti.launch.agent"


class StandbyLauncher:
    """A `smalti.launch.agent` that waits for the command to run."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()
        command = (sys.executable, "-m", AGENT, f"{STAND_BY}{reading}")
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        try:
            self._process = subprocess.Popen(command, env=environment, pass_fds=(reading,), start_new_session=True)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        self._used = False

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Run `python -m COMMAND` in it, in this environment. The caller then owns the process. None if it has ended."""
        if self._used or self._process.poll() is not None:
            return None
        self._used = True
        with suppress(BrokenPipeError), os.fdopen(self._pipe, "w", encoding="ascii") as pipe:
            pipe.write(json.dumps({"command": list(command), "environment": dict(environment)}) + "\n")
        return self._process

    def close(self) -> None:
        """End the process, unless `start` was called."""
        if not self._used:
            self._used = True
            os.close(self._pipe)
            self._process.kill()
            self._process.wait()
