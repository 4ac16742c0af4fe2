"""Resuming from a checkpoint in an object store: it is downloaded into the run directory first. Imports no torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from smalti import CheckpointError
from smalti.checkpoint import CheckpointStore, quick_check, read_manifest
from smalti.rundir import RunDirectory
from smalti.system import atomic_write, load_json, read_regular
from smalti_data.remote.checkpoints import CHECKPOINTS, UNUSABLE, RemoteCheckpoint, RemoteRun
from smalti_data.remote.downloads import download_checkpoint, download_missing

INDEXES = "data/trained/*/*.arrow"
"""The indexes with which checkpoints were trained, with which a resume compares its data: a pattern of `download_missing`."""
_CHOSEN = "chosen.json"
_READABLE = 80
"""Characters of a URL in the name of a folder."""


def find_to_resume(run: RemoteRun) -> RemoteCheckpoint:
    """The checkpoint that a run would resume from, by its manifest. Writes nothing. Raises CheckpointError if there is none."""
    reasons = []
    for each in run.find(run.only or "latest"):
        try:
            run.manifest(each)
        except UNUSABLE as error:
            reasons.append(f"{each.name}: {error.message}")
            continue
        return each
    raise _unusable(run, reasons)


def download_to_resume(run: RemoteRun, url: str, target: RunDirectory, report: Callable[[str], None]) -> Path:
    """Download the newest checkpoint of a run, or the only one, into a run directory; returns its path.

    It is not among the run's own checkpoints but in `downloads/`, where `downloaded` finds it by the URL. A damaged one is
    skipped with the reason. What was downloaded before and is intact is not sent again.
    """
    home = _home(target, url)
    store = CheckpointStore(home / CHECKPOINTS, report=report)
    reasons = []
    for each in run.find(run.only or "latest"):
        try:
            path = _present(run, each, store) or _download(run, each, store, report)
        except UNUSABLE as error:
            reasons.append(f"{each.name}: {error.message}")
            report(f"skipped {reasons[-1]}")
            continue
        download_missing(run.storage, INDEXES, home, report)
        chosen = {"url": url, "checkpoint": path.name}
        atomic_write(home / _CHOSEN, json.dumps(chosen, indent=1).encode() + b"\n")
        return path
    raise _unusable(run, reasons)


def downloaded(target: RunDirectory, url: str) -> Path | None:
    """The checkpoint that was downloaded from a URL last; None if none was."""
    home = _home(target, url)
    try:
        chosen = load_json(read_regular(home / _CHOSEN))
        return home / CHECKPOINTS / str(chosen["checkpoint"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{home / _CHOSEN} is damaged: {error}", fix="remove it, and start again") from error


def _home(target: RunDirectory, url: str) -> Path:
    """The folder for what is downloaded from a URL: part of the URL for the reader, and a digest of all of it."""
    address = url.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", address.partition("://")[2])[-_READABLE:].lstrip("._-")
    return target.path / "downloads" / f"{readable}-{sha256(address.encode()).hexdigest()[:8]}"


def _present(run: RemoteRun, checkpoint: RemoteCheckpoint, store: CheckpointStore) -> Path | None:
    """What was downloaded before. Only the presence and the sizes of files are compared: the ranks read every byte."""
    path = store.root / checkpoint.name
    if not path.is_dir() or not quick_check(path).ok:
        return None
    return path if read_manifest(path).holds_the_same_as(run.manifest(checkpoint)) else None


def _download(run: RemoteRun, checkpoint: RemoteCheckpoint, store: CheckpointStore, report: Callable[[str], None]) -> Path:
    folder = store.root.parent / "incoming" / checkpoint.name
    manifest = download_checkpoint(run, checkpoint, folder, report)
    with store.exclusive():
        path = store.publish(folder, manifest)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return path


def _unusable(run: RemoteRun, reasons: list[str]) -> CheckpointError:
    what = (
        "\n  ".join([f"no checkpoint of {run.location} can be used", *reasons])
        if reasons
        else f"no checkpoint in {run.location}"
    )
    return CheckpointError(what, fix="give the URL of a run, s3://BUCKET/RUN, or of one of its checkpoints")
