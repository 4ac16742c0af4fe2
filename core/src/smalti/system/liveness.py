"""Files by which processes of a node tell each other how they are.

A rank that is saving writes its progress, which the launcher checks before it kills a rank that does not exit. The agent writes
what it knows of the other nodes of the launch. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smalti.system.exit_reports import FOLDER_VARIABLE, exit_report_file, launched
from smalti.system.files import atomic_write, load_json, read_regular
from smalti.system.streams import flush_standard_streams

_EVERY_SECONDS = 1.0


class _Progress:
    """The latest progress of this process. The launcher reads it as the modification time of the rank's exit report file."""

    def __init__(self) -> None:
        self._latest = time.monotonic()

    def note(self) -> None:
        now = time.monotonic()
        if now - self._latest < _EVERY_SECONDS:
            return
        self._latest = now
        if launched():
            with suppress(OSError):
                os.utime(exit_report_file())

    def age(self) -> float:
        return time.monotonic() - self._latest


_progress = _Progress()


def note_progress() -> None:
    """Note that a save made progress: a chunk was copied, written or read back. Cheap, and callable from any thread."""
    _progress.note()


def seconds_without_progress() -> float:
    """Since the latest progress of a save in this process, or since its start."""
    return _progress.age()


def exit_within(seconds: float, code: int) -> None:
    """Exit this process with `code` if it has not ended, and its save has made no progress, for `seconds`.

    For ranks that fail: closing resources may wait for other ranks that will never answer.
    """
    started = time.monotonic()

    def exit_after_timeout() -> None:
        while (remaining := seconds - min(time.monotonic() - started, _progress.age())) > 0:
            time.sleep(remaining)
        flush_standard_streams()
        os._exit(code)

    threading.Thread(target=exit_after_timeout, name="smalti-exit", daemon=True).start()


def latest_progress(rank: int) -> float:
    """When this rank of the launch last made progress, in unix seconds; 0 if never."""
    try:
        return exit_report_file(rank).stat().st_mtime
    except OSError:
        return 0.0


_FILE = "lost.json"


@dataclass(frozen=True, kw_only=True)
class LostPeers:
    """`nodes` that are lost, and `ranks` that were killed, by their numbers, each with how that was noticed.

    `fix` is what a user can do about lost nodes.
    """

    nodes: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, str] = field(default_factory=dict)
    fix: str = field(default="", compare=False)


def write_lost_peers(peers: LostPeers) -> None:
    """Let the ranks of this node know, in its agent. Has no effect where the file cannot be written."""
    with suppress(OSError):
        atomic_write(Path(os.environ[FOLDER_VARIABLE]) / _FILE, json.dumps(asdict(peers)).encode())


def read_lost_peers() -> LostPeers:
    """What the agent has written; nothing where no launcher has started this process. Costs one call of the system."""
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        values = load_json(read_regular(Path(folder) / _FILE)) if folder is not None else {}
    except (OSError, ValueError):
        return LostPeers()
    nodes, ranks = ({int(number): why for number, why in values.get(kind, {}).items()} for kind in ("nodes", "ranks"))
    return LostPeers(nodes=nodes, ranks=ranks, fix=values.get("fix", ""))
