"""What identifies the content of a table: its place, size and time or etag."""

from __future__ import annotations

from pathlib import Path

from smalti.data import Storage


def file_identity(path: Path) -> str:
    """Changes with the content of a file of this machine: its path, size and modification time. Raises OSError."""
    stat = path.stat()
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def stored_identity(storage: Storage, key: str) -> str:
    """The same for a file of a storage. Raises StorageError."""
    file = storage.stat(key)
    return f"{storage.location}/{key}:{file.size}:{file.etag}"
