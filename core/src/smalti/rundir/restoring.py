"""Detect that a run directory was removed or moved during its run, and create it again with everything that a resume needs.

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
    """Identifies a directory by its inode, and remembers the contents of its small files at the last call of `keep`."""

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
        """Remember the files that describe how the run was started."""
        path = self._directory.path
        found = sorted(file for pattern in _KEPT for file in path.glob(pattern))
        self._files = {file.name: file.read_bytes() for file in found}
        self._encoded = any(path.glob("cache/*/*.safetensors"))

    def lost(self, *, surely: bool = False) -> bool:
        """Whether the directory is missing, empty or another one, now and at the last call.

        The second check waits for a removal file by file to finish. With `surely` one check is enough.
        """
        found = self._found()
        lost = found != self._place or not self._directory.record_file.exists()
        self._seen, before = (found,) if lost else None, self._seen
        return lost and (surely or self._seen == before)

    @property
    def lost_encoded(self) -> bool:
        """Whether encoded images and texts were in the directory and are missing now."""
        return self._encoded and not any(self._directory.path.glob("cache/*/*.safetensors"))

    def restore(self, events: EventWriter) -> str:
        """Create the directory again, with these files and all events. Returns what happened, as a message. Raises OSError.

        Existing files stay. In a directory that was moved, a final event says that the run continues elsewhere.
        """
        path, moved_to = self._directory.path, self._moved_to()
        path.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            if not (path / name).exists():
                atomic_write(path / name, content)
        if moved_to is None:
            events.move(self._directory.events_file)
            self._settle()
            return f"{path} was removed with everything saved in it; it was created again, and the run continues in it"
        message = f"this directory was moved during its run; the run continues in {path.absolute()}"
        events.move(self._directory.events_file, {"state": "stopped", "message": message, "exit_code": int(ExitCode.FAILED)})
        with suppress(OSError):
            os.unlink("heartbeat", dir_fd=self._handle)
        self._settle()
        return f"{path} was moved to {moved_to}; it was created again, and the run continues in it"

    def follow(self, events: EventWriter) -> None:
        """The same for a process that waits until another one has restored the directory."""
        if self._found() is not None and self._directory.events_file.exists():
            events.move(self._directory.events_file)
            self._settle()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _settle(self) -> None:
        """Adopt the directory that is at the path now."""
        self.close()
        self._handle = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(self._handle)
        self._place = status.st_dev, status.st_ino

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self._directory.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # the file server does not answer, so nothing is known
            return self._place
        return status.st_dev, status.st_ino

    def _moved_to(self) -> Path | None:
        """Where the directory is now; None if it was removed or emptied, or if the system does not report it."""
        if self._found() == self._place:
            return None
        try:
            where = Path(f"/proc/self/fd/{self._handle}").readlink()
            status = where.stat()
        except OSError:
            return None
        return where if (status.st_dev, status.st_ino) == self._place else None
