"""What identifies the content of a table: its place, size and time or etag."""

from __future__ import annotations

import os
from pathlib import Path

from smalti.data import Storage
from smalti.system import open_regular


def file_identity(path: Path) -> str:
    """Changes with the content of a file of this machine: its path, size and time of change. Raises OSError; a pipe is one."""
    with open_regular(path) as file:
        stat = os.fstat(file.fileno())
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def stored_identity(storage: Storage, key: str) -> str:
    """The same for a file of a storage. Raises StorageError."""
    file = storage.stat(key)
    return f"{storage.location}/{key}:{file.size}:{file.etag}"
