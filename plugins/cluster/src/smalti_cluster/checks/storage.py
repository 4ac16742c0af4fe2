"""Whether nodes see one and the same folder, and how soon each sees what another has written there."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "ramfs", "bcachefs"}
"""Types of file systems without caches that would show other nodes' files late."""
_LOCAL_SECONDS = 3.0
_REMOTE_SECONDS = 30.0
"""How long a new folder of node 0 may take to be seen, by the type of the file system."""
_FIRST_SLEEP, _LONGEST_SLEEP = 0.005, 0.25


def mount_of(path: Path) -> str:
    """The file system of a path, such as "nfs4 (10.0.0.1:/export)"."""
    found, longest = "an unknown file system", -1
    resolved = path.resolve()
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            point = Path(left.split()[4].encode().decode("unicode_escape"))
            if (resolved == point or point in resolved.parents) and len(point.parts) >= longest:
                kind, source, *_ = right.split()
                found, longest = f"{kind} ({source})", len(point.parts)
    return found


def sees(path: Path) -> bool:
    """Whether this node sees a folder that node 0 has just made, within the time that its file system may need."""
    kind = mount_of(path.parent).partition(" ")[0]
    deadline = time.monotonic() + (_LOCAL_SECONDS if kind in _LOCAL else _REMOTE_SECONDS)
    sleep = _FIRST_SLEEP
    while not path.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)
    return True


def write_draft(folder: Path, name: str, names: Sequence[str]) -> None:
    """Write the file that `publish` renames, and look for all files, so that this node caches that they are not there.

    Raises OSError.
    """
    with (folder / f".{name}").open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    list(folder.iterdir())
    for each in names:
        (folder / each).exists()


def publish(folder: Path, name: str) -> None:
    """Raises OSError."""
    (folder / f".{name}").rename(folder / name)


def missing_files(folder: Path, names: Sequence[str], seconds: float) -> list[str]:
    """Wait until each file can be read and is in the listing. Returns those that are not within this time."""
    missing, deadline, sleep = set(names), time.monotonic() + seconds, _FIRST_SLEEP
    while True:
        listed = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        missing -= {name for name in missing & listed if _content(folder / name) == name}
        if not missing or time.monotonic() > deadline:
            return sorted(missing)
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)


def remove_all(folder: Path) -> list[str]:
    """Remove the files that all nodes have written. Returns what could not be removed, with the reason."""
    failed = []
    with suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            try:
                path.unlink()
            except OSError as error:
                failed.append(f"{path.name}: {error.strerror or error}")
    return failed


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
