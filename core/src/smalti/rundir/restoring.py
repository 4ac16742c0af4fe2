"""A run directory that is removed or moved away while its run goes on: noticed, and made again with all that a resume takes.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from smalti.errors import ExitCode
from smalti.rundir.directory import RunDirectory
from smalti.rundir.events import EventWriter
from smalti.system import atomic_write

_KEPT = ("config.toml", "config.next.toml", "launch.json", "launch.next.json", "accelerate*.yaml")


class Restorer:
    """Knows a directory by what it is, not by its path, and what the small files in it held when `keep` was called last."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._files: dict[str, bytes] = {}
        self._encoded = False
        self._handle = -1
        self._place: tuple[int, int] | None = None
        self._seen: tuple[tuple[int, int] | None] | None = None
        self._settle()
        self.keep()

    def keep(self) -> None:
        """Remember the files that say how the run is started."""
        path = self._directory.path
        found = sorted(file for pattern in _KEPT for file in path.glob(pattern))
        self._files = {file.name: file.read_bytes() for file in found}
        self._encoded = any(path.glob("cache/*/*.safetensors"))

    def lost(self, *, surely: bool = False) -> bool:
        """Whether there is no directory at the path, or another one, or an empty one; and that was so the last time too.

        Who removes a directory file by file is not to be disturbed; with `surely`, now is the last time to look.
        """
        found = self._found()
        lost = found != self._place or not self._directory.record_file.exists()
        self._seen, before = (found,) if lost else None, self._seen
        return lost and (surely or self._seen == before)

    @property
    def lost_encoded(self) -> bool:
        """Whether the images and texts that were encoded ahead lay in the directory, and do not any more."""
        return self._encoded and not any(self._directory.path.glob("cache/*/*.safetensors"))

    def restore(self, events: EventWriter) -> str:
        """Make the directory again, with these files and all events; returns what has happened. Raises OSError.

        What is there already stays. A directory that was moved away is told in its own events that the run is not there.
        """
        path, moved_to = self._directory.path, self._moved_to()
        path.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            if not (path / name).exists():
                atomic_write(path / name, content)
        if moved_to is None:
            events.move(self._directory.events_file)
            self._settle()
            return f"{path} was removed, with all that was saved there; it was made again, and the run goes on and saves there"
        message = f"this directory was moved while its run wrote there; the run goes on in {path.absolute()}"
        events.move(self._directory.events_file, {"state": "stopped", "message": message, "exit_code": int(ExitCode.FAILED)})
        with suppress(OSError):
            os.unlink("heartbeat", dir_fd=self._handle)
        self._settle()
        return f"{path} was moved to {moved_to}; it was made again, and the run goes on and saves there"

    def follow(self, events: EventWriter) -> None:
        """The same for a process that leaves the restoring to another one."""
        if self._found() is not None and self._directory.events_file.exists():
            events.move(self._directory.events_file)
            self._settle()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _settle(self) -> None:
        """From now on the directory is the one at the path."""
        self.close()
        self._handle = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(self._handle)
        self._place = status.st_dev, status.st_ino

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self._directory.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # its server does not answer, which says nothing
            return self._place
        return status.st_dev, status.st_ino

    def _moved_to(self) -> Path | None:
        """Where the directory is now; None if it was removed or emptied, or where the system does not tell."""
        if self._found() == self._place:
            return None
        try:
            where = Path(f"/proc/self/fd/{self._handle}").readlink()
            status = where.stat()
        except OSError:
            return None
        return where if (status.st_dev, status.st_ino) == self._place else None
