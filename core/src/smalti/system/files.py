"""Files that are either complete or absent, regular files alone, and guarded readers of JSON and TOML.

Everything that must survive a crash is written through the operations below. Each is a single step that has happened or has
not.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Block = bytes | memoryview
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?)?")


# --- single steps ---------------------------------------------------------------------------------------------------


def create(path: Path) -> io.FileIO:
    """Open a new file for unbuffered writing. Raises FileExistsError if it exists."""
    return io.FileIO(path, "x")


def write(file: io.FileIO, data: Block) -> None:
    """Append all of `data` to the file."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def sync(file: io.FileIO) -> None:
    """Make the contents of a file survive a power failure. Its name survives once its directory is synced, too."""
    os.fsync(file.fileno())


def rename(old: Path, new: Path) -> None:
    """Rename a file atomically, within one file system. Replaces a file of the new name."""
    old.replace(new)


def make_directory(path: Path) -> None:
    path.mkdir()


def remove_file(path: Path) -> None:
    path.unlink()


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    path.rmdir()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory (files created, renamed or removed) survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync directories; they write names through by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int | None:
    """Free space on the file system of `path`; None if it does not report any, as some network file systems do not."""
    status = os.statvfs(path)
    if status.f_blocks == 0:
        return None
    # Only root may use the reserved blocks.
    return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """1 -> "1 block", 2 -> "2 blocks"."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, "0:05:10"; "-" if it is unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def format_bytes(number: int) -> str:
    """1536 -> "1.5 KiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log2(number)) // 10, len(units) - 1) if number else 0
    return f"{number} B" if power == 0 else f"{number / 2 ** (10 * power):.1f} {units[power]}"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "10GB" (10**10), "5GiB" or "500M" (500 * 2**20). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; give one such as 10GB, 5GiB or 500MB")
    base = 1000 if match[3] == "B" else 1024
    return int(float(match[1]) * base ** ("KMGT".index(match[2]) + 1 if match[2] else 0))


# --- built from them ------------------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it. Symbolic links are removed, not followed."""
    with os.scandir(path) as entries:
        found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for each, is_directory in sorted(found):
        if is_directory:
            remove_tree(each)
        else:
            remove_file(each)
    remove_directory(path)


def atomic_write(path: Path, data: bytes | io.BufferedReader, *, mode: int | None = None) -> None:
    """Write `data` to `path` atomically: readers find the old contents or the new ones, also after a power failure.

    A file is copied from its place on, in bounded memory. The directory must exist. Raises OSError and keeps the old file if
    the disk is full. `mode` sets the permissions of the file; None leaves the default ones.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with create(draft) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            for block in (data,) if isinstance(data, bytes) else iter(lambda: data.read(1 << 20), b""):
                write(file, block)
            sync(file)
        rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def link_or_copy(old: Path, new: Path) -> None:
    """Replace `new` by the file `old`, as a whole: a hard link, or a copy on a file system without links. Raises OSError."""
    draft = new.with_name(f".{new.name}.{os.getpid()}")
    try:
        try:
            draft.hardlink_to(old)
        except OSError:
            shutil.copyfile(old, draft)
        draft.replace(new)
    finally:
        draft.unlink(missing_ok=True)


def write_json_atomically(path: Path, value: object) -> None:
    """Write `value` as indented JSON with `atomic_write`. Raises ValueError for NaN and infinities."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file. Anything else is an OSError: opening or reading a pipe or a device could block forever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def parse_json(data: bytes | str) -> object:
    """Parse strict JSON: UTF-8, no NaN, no infinities, no duplicate keys. Raises ValueError."""
    text = data if isinstance(data, str) else data.decode()
    return load_json(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=_finite)


def load_json(data: bytes | str, **hooks: Any) -> Any:
    """`json.loads`, whose only error is ValueError: one for text that is nested too deeply, too."""
    return _shallow(json.loads, data, **hooks)


def load_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads`, whose only error is ValueError: one for text that is nested too deeply, too."""
    import tomllib

    return _shallow(tomllib.loads, text)


def _shallow(parse: Callable[..., T], data: bytes | str, **hooks: Any) -> T:
    try:
        return parse(data, **hooks)
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
    raise ValueError(f"{constant} is not valid in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
