"""Brings a checkpoint of a mirror, and what else a resume needs, into a run directory. Imports no torch."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from smalti import CheckpointError, PreflightError
from smalti.checkpoint import GROUPS, CheckpointStore, FileRecord, Manifest, new_digest
from smalti.cli import format_bytes
from smalti.data import Storage, TransfersFiles
from smalti.rundir import RunDirectory
from smalti.system import atomic_write, free_bytes, fsync_directory
from smalti_storage_s3.mirror.remote import TRANSFERS, UNUSABLE, Mirror, RemoteCheckpoint
from smalti_storage_s3.mirror.upload import KEPT_FILES, RUN_FILES, WORK

_INCOMING = "incoming"
_REPORT_SECONDS = 10.0
_BUFFER = 2**18


def pull(mirror: Mirror, run: RunDirectory, choice: str, report: Callable[[str], None]) -> Path:
    """Download the checkpoint that `choice` means; returns its path in the run directory.

    A damaged checkpoint is skipped with the reason, and the one before it is taken, unless a step was chosen. What an
    interrupted download has left is used. Raises CheckpointError if no checkpoint can be used, StorageError if the mirror
    cannot be read now, PreflightError if there is not enough space.
    """
    pull_run_files(mirror.storage, run)
    reasons = []
    for each in mirror.find(choice):
        try:
            folder, manifest = fetch_checkpoint(mirror, each, run, report)
        except UNUSABLE as error:
            reasons.append(f"skipped {each.name} of {mirror.location}: {error.message}")
            report(reasons[-1])
            continue
        store = CheckpointStore(run.checkpoints, report=report)
        with store.exclusive():
            path = store.publish(folder, manifest)
        shutil.rmtree(folder.parent, ignore_errors=True)
        return path
    raise CheckpointError(
        "\n  ".join([f"no checkpoint of {mirror.location} can be used", *reasons]),
        fix="restore the missing files there, or start over with another --checkpoint_mirror",
    )


def pull_run_files(storage: Storage, run: RunDirectory) -> None:
    """Download what describes the run, as far as it is missing. First run.json, by which a run directory is known."""
    run.path.mkdir(parents=True, exist_ok=True)
    for pattern in (*RUN_FILES, KEPT_FILES):
        for stored in storage.list(pattern.partition("*")[0]):
            path = run.path / stored.key
            if fnmatchcase(stored.key, pattern) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                download(storage, stored.key, path)


def fetch_checkpoint(
    mirror: Mirror, checkpoint: RemoteCheckpoint, run: RunDirectory, report: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Download the files of a checkpoint into a folder, several at a time, compare their digests, and sync them.

    Returns the folder, which has no manifest yet, and the manifest.
    """
    manifest = mirror.manifest(checkpoint)
    folder = run.path / WORK / _INCOMING / checkpoint.name
    parents = {folder / group for group in GROUPS} | {(folder / name).parent for name in manifest.files}
    for parent in parents:
        parent.mkdir(parents=True, exist_ok=True)
    missing = {name: record for name, record in manifest.files.items() if not _is_there(folder / name, record)}
    size = sum(record.size for record in missing.values())
    free = free_bytes(folder)
    if free is not None and size > free:
        message = (
            f"{format_bytes(size)} are needed for {checkpoint.name} of {mirror.location}, and {format_bytes(free)} are free"
        )
        raise PreflightError(message, fix=f"free space in {run.path}, or choose another --output_dir")
    progress = Progress(f"downloading {checkpoint.name} from {mirror.location}", size, report)

    def fetch(name: str) -> None:
        path, record = folder / name, missing[name]
        download(mirror.storage, checkpoint.prefix + name, path)
        if not _is_there(path, record):
            path.unlink(missing_ok=True)
            raise CheckpointError(f"{name} does not match its digest: damaged or edited")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        progress.add(record.size)

    with ThreadPoolExecutor(TRANSFERS, "smalti-mirror") as pool:
        list(pool.map(fetch, sorted(missing)))
    for parent in parents:
        fsync_directory(parent)
    return folder, manifest


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


def download(storage: Storage, key: str, path: Path) -> None:
    if isinstance(storage, TransfersFiles):
        storage.download(key, path)
    else:
        atomic_write(path, storage.read(key))


class Progress:
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
