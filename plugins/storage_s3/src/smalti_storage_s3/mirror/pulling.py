"""Brings a checkpoint of a mirror, and what else a resume needs, into a run directory. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from smalti import CheckpointError
from smalti.checkpoint import CheckpointStore, Manifest
from smalti.data import Storage
from smalti.rundir import RunDirectory
from smalti_data.remote.checkpoints import UNUSABLE, RemoteCheckpoint, RemoteRun
from smalti_data.remote.downloads import download_checkpoint, download_missing
from smalti_storage_s3.mirror.upload import KEPT_FILES, RUN_FILES, WORK

_INCOMING = "incoming"


def pull(mirror: RemoteRun, run: RunDirectory, choice: str, report: Callable[[str], None]) -> Path:
    """Download the checkpoint that `choice` means; returns its path in the run directory.

    A damaged checkpoint is skipped with the reason, and the one before it is taken, unless a step was chosen. What an
    interrupted download has left is used. Raises CheckpointError if no checkpoint can be used, StorageError if the mirror
    cannot be read now, PreflightError if there is not enough space.
    """
    pull_run_files(mirror.storage, run, report)
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


def pull_run_files(storage: Storage, run: RunDirectory, report: Callable[[str], None]) -> None:
    """Download what describes the run, as far as it is missing. First run.json, by which a run directory is known."""
    run.path.mkdir(parents=True, exist_ok=True)
    for pattern in (*RUN_FILES, KEPT_FILES):
        download_missing(storage, pattern, run.path, report)


def fetch_checkpoint(
    mirror: RemoteRun, checkpoint: RemoteCheckpoint, run: RunDirectory, report: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Download a checkpoint into a folder that has no manifest yet. Returns the folder and the manifest."""
    folder = run.path / WORK / _INCOMING / checkpoint.name
    return folder, download_checkpoint(mirror, checkpoint, folder, report)
