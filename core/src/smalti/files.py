"""Files that are either whole or not there, and JSON that means exactly one thing.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
from pathlib import Path


def atomic_write(path: Path, data: bytes) -> None:
    """Put `data` at `path`: a reader, also one after a power cut, finds the old contents or the new, never a part.

    The directory must exist. Raises OSError and leaves the old file alone when there is no room.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_atomically(path: Path, value: object) -> None:
    """`value` as readable JSON, through `atomic_write`. Raises ValueError for NaN and infinities, which are not JSON."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


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


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces. Runs without the interpreter lock, so threads help."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
