"""Files that are either whole or not there, and JSON that means exactly one thing.

Whatever must survive a crash is written through the few operations below, each one step that has happened or has not.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import secrets
from pathlib import Path

Block = bytes | memoryview


# --- one step each --------------------------------------------------------------------------------------------------


def create(path: Path) -> io.FileIO:
    """A new file to write to, without a buffer. FileExistsError if there is one."""
    return io.FileIO(path, "x")


def write(file: io.FileIO, data: Block) -> None:
    """All of `data` at the end of the file."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def sync(file: io.FileIO) -> None:
    """Make the contents of a file survive a power cut; its name does once its directory was synced."""
    os.fsync(file.fileno())


def rename(old: Path, new: Path) -> None:
    """Another name on the same file system, at one instant; a file that had this name is replaced."""
    old.replace(new)


def make_directory(path: Path) -> None:
    path.mkdir()


def remove_file(path: Path) -> None:
    path.unlink()


def remove_directory(path: Path) -> None:
    """It must be empty."""
    path.rmdir()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory (files created, renamed or removed) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for directories; they write names through by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int | None:
    """Room for new files on the file system of `path`; None where the system does not tell, as some network ones do not."""
    status = os.statvfs(path)
    if status.f_blocks == 0:
        return None
    # Only root may use what is held back.
    return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)


# --- made of these --------------------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """A directory and all below it; links are removed, not followed."""
    with os.scandir(path) as entries:
        found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for each, is_directory in sorted(found):
        if is_directory:
            remove_tree(each)
        else:
            remove_file(each)
    remove_directory(path)


def atomic_write(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Put `data` at `path`: a reader, also one after a power cut, finds the old contents or the new, never a part.

    The directory must exist. Raises OSError and leaves the old file alone when there is no room. `mode` are the permissions of
    the file, None for the usual ones.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with create(draft) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            write(file, data)
            sync(file)
        rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_atomically(path: Path, value: object) -> None:
    """`value` as readable JSON, through `atomic_write`. Raises ValueError for NaN and infinities, which are not JSON."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def parse_json(data: bytes) -> object:
    """JSON as the standard has it: UTF-8, no NaN, no infinities, no key twice in one object. Raises ValueError."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number that JSON knows")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
