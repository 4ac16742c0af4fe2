"""Checkpoints of nodes that share no file system: how files of other nodes reach the directory of the main rank."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Relay(Protocol):
    """Carries files between nodes, through a place that all of them reach. Names are relative paths; one save runs at a time.

    A plugin sets it as `Snapshot.relay` before a save. A file that cannot be carried is an OSError or a UserError.
    """

    def send(self, path: Path, name: str) -> None:
        """Send a file. Called on a rank that does not see the directory of the main rank."""
        ...

    def fetch(self, name: str, path: Path) -> None:
        """Write a file that another rank has sent to `path`, synced. Called on the main rank."""
        ...

    def clear(self) -> None:
        """Remove all that was sent. Called on the main rank after each save, also after one that failed."""
        ...
