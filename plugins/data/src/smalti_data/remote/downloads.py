"""Downloads checkpoints, whole or in part, and compares the digests of their files. Imports no torch."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import CheckpointError, PreflightError, UserError
from smalti.checkpoint import GROUPS, MANIFEST, WEIGHTS, FileRecord, Manifest, new_digest
from smalti.data import InvalidKeyError, MissingFileError, Storage, checked_key
from smalti.system import atomic_write, format_bytes, free_bytes, fsync_directory
from smalti_data.remote.checkpoints import CHECKPOINTS, RemoteCheckpoint, RemoteRun

TRANSFERS = 2
"""Files that are sent or downloaded at a time: each takes several connections, and the memory of several parts."""
_REPORT_SECONDS = 10.0
_BUFFER = 2**18

Report = Callable[[str], None]


def download_missing(storage: Storage, pattern: str, folder: Path, report: Report) -> None:
    """Download the files whose keys match `pattern` below `folder`, as far as they are not there.

    A `*` stands for any characters of one name, so never for "/". A key that could lead elsewhere is skipped and reported.
    """
    matches = re.compile("[^/]*".join(map(re.escape, pattern.split("*")))).fullmatch
    for stored in storage.list(pattern.partition("*")[0]):
        if not matches(stored.key):
            continue
        try:
            path = folder / checked_key(stored.key)
        except InvalidKeyError as error:
            report(f"skipped a file of {storage.location}: {error.message}")
            continue
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.download(stored.key, path)


def download_checkpoint(
    run: RemoteRun, checkpoint: RemoteCheckpoint, folder: Path, report: Report, *, groups: Collection[str] | None = None
) -> Manifest:
    """Download the files of a checkpoint into a folder, several at a time, compare their digests, and sync them.

    Files that are there and intact are not sent again. Returns the manifest, which is not written. With `groups`, only these
    groups of tensors are downloaded, and the manifest is that of a checkpoint without the others.
    """
    manifest = run.manifest(checkpoint)
    if groups is not None:
        left_out = {*GROUPS, WEIGHTS} - set(groups)
        kept = {name: record for name, record in manifest.files.items() if name.partition("/")[0] not in left_out}
        manifest = replace(manifest, files=kept)
    parents = {folder / group for group in GROUPS} | {(folder / name).parent for name in manifest.files}
    for parent in parents:
        parent.mkdir(parents=True, exist_ok=True)
    missing = {name: record for name, record in manifest.files.items() if not _is_there(folder / name, record)}
    size = sum(record.size for record in missing.values())
    free = free_bytes(folder)
    if free is not None and size > free:
        message = f"{format_bytes(size)} are needed for {checkpoint.name} of {run.location}, and {format_bytes(free)} are free"
        raise PreflightError(message, fix=f"free space in {folder.parent}, or choose another folder")
    progress = _Progress(f"downloading {checkpoint.name} from {run.location}", size, report)

    def fetch(name: str) -> None:
        path, record = folder / name, missing[name]
        run.storage.download(checkpoint.prefix + name, path)
        if not _is_there(path, record):
            path.unlink(missing_ok=True)
            raise CheckpointError(f"{name} does not match its digest: damaged or edited")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        progress.add(record.size)

    with ThreadPoolExecutor(TRANSFERS, "smalti-remote") as pool:
        list(pool.map(fetch, sorted(missing)))
    for parent in parents:
        fsync_directory(parent)
    return manifest


@contextmanager
def download_partly(
    run: RemoteRun, checkpoint: RemoteCheckpoint, beside: Path, report: Report, groups: Collection[str] | None
) -> Iterator[Path]:
    """Yields the path of a checkpoint with these `groups` of tensors in a temporary run directory, removed at the end.

    That is a hidden folder beside the path `beside`: where the result is written, there is space.
    """
    place = next(each for each in beside.absolute().parents if each.is_dir())
    with TemporaryDirectory(dir=place, prefix=".smalti-download-", ignore_cleanup_errors=True) as folder:
        name = run.storage.location.split(" ")[0].rstrip("/").rpartition("/")[2] or "run"
        path = Path(folder) / name / CHECKPOINTS / checkpoint.name
        try:
            manifest = download_checkpoint(run, checkpoint, path, report, groups=groups)
            run.storage.download("launch.json", path.parent.parent / "launch.json")
        except MissingFileError as error:
            if "launch.json" not in error.message:
                raise
        except OSError as error:
            raise UserError(f"cannot write {error.filename}: {error.strerror}", fix="free space there") from error
        for group in GROUPS:
            if not any(name.startswith(f"{group}/") for name in manifest.files):
                (path / group).rmdir()
        atomic_write(path / MANIFEST, manifest.encode())
        yield path


def _is_there(path: Path, record: FileRecord) -> bool:
    """Whether a file has the recorded size and digest."""
    try:
        if path.stat().st_size != record.size:
            return False
    except FileNotFoundError:
        return False
    digest, buffer = new_digest(record.algorithm), memoryview(bytearray(_BUFFER))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest() == record.digest


class _Progress:
    """Reports from time to time how much of a transfer is done, and how long the rest takes. Thread-safe."""

    def __init__(self, label: str, total: int, report: Callable[[str], None]) -> None:
        self._label = label
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()
        self._started = self._reported = time.monotonic()
        report(f"{label}: {format_bytes(total)}")

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._reported < _REPORT_SECONDS or self._done >= self._total:
                return
            self._reported = now
            rest = (now - self._started) / self._done * (self._total - self._done)
            share = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        self._report(f"{self._label}: {share}, about {rest:.0f} s left")
