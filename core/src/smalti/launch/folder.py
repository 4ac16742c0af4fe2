"""The temporary folder of a launch, for what its processes tell each other. A later launch clears that of a killed one.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from smalti.errors import PreflightError
from smalti.system import FOLDER_VARIABLE, Process, preallocate

_PREFIX = "smalti-"
_OWNER = "owner.json"


@contextmanager
def launch_folder(ranks: Iterable[int]) -> Iterator[str]:
    """A new one with room for the last words of these ranks. Raises PreflightError when there is no room for it."""
    remove_abandoned(Path(tempfile.gettempdir()))
    try:
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        (Path(folder.name) / _OWNER).write_text(json.dumps(asdict(Process.current())))
        preallocate(Path(folder.name), ranks)
    except OSError as error:
        message = f"cannot create temporary files in {tempfile.gettempdir()}: {error.strerror or error}"
        raise PreflightError(message, fix="free space there, or set TMPDIR to another folder") from error
    with folder as name:
        yield name


def processes_of(folder: str) -> list[psutil.Process]:
    """Whatever belongs to the launch of this folder, wherever the system has put it. Those of other users are not seen."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(FOLDER_VARIABLE) == folder:
                found.append(each)
    return found


def remove_abandoned(place: Path) -> None:
    """Remove this user's folders in `place` whose launch is over: it started here, and none of its processes is left."""
    for folder in place.glob(f"{_PREFIX}*"):
        owner = _owner(folder)
        if owner is not None and owner.alive() is False and not processes_of(f"{folder}"):
            shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> Process | None:
    """The process that made a folder; None for whatever else has such a name, or belongs to another user."""
    try:
        if not all(_is_own(path, kind) for path, kind in ((folder, stat.S_ISDIR), (folder / _OWNER, stat.S_ISREG))):
            return None
        return Process(**json.loads((folder / _OWNER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    status = path.lstat()
    return kind(status.st_mode) and status.st_uid == os.geteuid()
