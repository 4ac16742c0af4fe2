"""What Ray places: one worker of a run, a node of its group, in an actor of Ray.

The ranks are not in the actor, whose functions run in threads in which no signal handler can be installed, but in the same
processes that any other launcher starts (`smalti_ray.launch.process`).
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from smalti import ExitCode
from smalti_ray.cluster import versions


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Where a worker is. `node` is the id of Ray's node, `port` a free one. `versions` are those of packages by name."""

    node: str
    host: str
    address: str
    port: int
    versions: Mapping[str, str]


class Worker:
    """One worker, on the node that Ray has chosen. `name` is for Ray's dashboard and its logs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: int | None = None

    def __repr__(self) -> str:
        return self._name

    def facts(self) -> Facts:
        """Where this worker is, and what is installed there."""
        with socket.create_server(("", 0)) as probe:
            port = int(probe.getsockname()[1])
        return Facts(
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            port=port,
            versions=versions(),
        )

    def missing(self, files: Mapping[str, str], directory: str, folder: str) -> list[str]:
        """Of these files, those that have other content here; the run's directory if it is not writable; the current folder."""
        found = [path for path, content in files.items() if _text(path) != content]
        found += [] if Path(folder).is_dir() else [folder]
        try:
            probe = Path(directory, f".probe-{secrets.token_hex(8)}")
            probe.touch()
            probe.unlink()
        except OSError:
            found.append(directory)
        return found

    def run(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> int:
        """Train with these arguments of `smalti train` and variables, in this folder. Returns the exit code, at the end.

        An empty variable is removed, such as OMP_NUM_THREADS, which Ray sets to the cores of a worker.
        """
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value or name not in variables}
        requests, self._requests = os.pipe()
        result, written = os.pipe()
        command = [sys.executable, "-m", "smalti_ray.launch.process", str(requests), str(written), *words]
        try:
            subprocess.run(command, env=environment, cwd=folder, pass_fds=(requests, written), check=True)
        finally:
            os.close(requests)
            os.close(written)
        with os.fdopen(result) as pipe:
            text = pipe.read()
        return int(text) if text else int(ExitCode.KILLED)

    def stop(self) -> None:
        """Ask the process to save and stop. All workers of a run stop together, whichever is asked."""
        if self._requests is not None:
            descriptor, self._requests = self._requests, None
            os.close(descriptor)


def _text(path: str) -> str | None:
    """The content of a file; None if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
