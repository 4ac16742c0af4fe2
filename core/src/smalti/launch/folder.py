"""The temporary folder of a launch, for messages between its processes. A later launch removes the folder of a killed one.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from smalti.errors import PreflightError
from smalti.system import FOLDER_VARIABLE, Process, load_json, preallocate, read_regular

_PREFIX = "smalti-"
_OWNER = "owner.json"


@contextmanager
def launch_folder(ranks: Iterable[int]) -> Iterator[str]:
    """Create the folder, with preallocated exit reports for these ranks. Raises PreflightError if the disk is full."""
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
    """All processes of the launch with this folder. Processes of other users are not visible."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(FOLDER_VARIABLE) == folder:
                found.append(each)
    return found


def remove_abandoned(place: Path) -> None:
    """Remove this user's folders in `place` whose launch has ended: it ran on this node, and none of its processes remains."""
    for folder in place.glob(f"{_PREFIX}*"):
        owner = _owner(folder)
        if owner is not None and owner.alive() is False and not processes_of(f"{folder}"):
            shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> Process | None:
    """The process that created a folder; None if it belongs to another user, or is not a folder of a launch."""
    file = folder / _OWNER
    try:
        if any(path.is_symlink() or path.lstat().st_uid != os.geteuid() for path in (folder, file)):
            return None
        return Process(**load_json(read_regular(file)))
    except (OSError, ValueError, TypeError):
        return None
