"""Where `smalti checkpoint` finds checkpoints: in folders, or behind URLs such as s3://BUCKET/RUN. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    WEIGHTS,
    CheckpointStore,
    Entry,
    ListedCheckpoint,
    RunPlace,
    StoredTensor,
    read_manifest,
    stored_tensors,
    verify,
)
from smalti.errors import CheckpointError, UserError
from smalti.plugins import is_url, load_plugins, open_run, selection_of


def place_at(text: str) -> Place:
    """What is at the path of an existing folder, or at a URL that a plugin opens. Raises UserError if there is nothing."""
    if is_url(text):
        return open_run(text, load_plugins(selection_of((), None, os.environ), strict=False))
    if not Path(text).is_dir():
        raise UserError(f"there is no folder {text}", fix="check the path; relative paths start at the current folder")
    return LocalPlace(Path(text))


class LocalPlace:
    """A run directory or checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def checkpoints(self) -> list[ListedCheckpoint]:
        """All of them, lowest step first. Reads manifests only."""
        if is_checkpoint(self.path):
            return [self.newest()]
        return [_listed(entry) for entry in entries(self.path)]

    def newest(self) -> ListedCheckpoint:
        """The newest one whose manifest can be used; without one the newest. Raises UserError if there is none."""
        path = newest(self.path)
        try:
            manifest, problem = read_manifest(path), ""
        except CheckpointError as error:
            manifest, problem = None, error.message
        return ListedCheckpoint(
            name=path.name, path=str(path), step=manifest.step if manifest else 0, manifest=manifest, problem=problem
        )

    def tensors(self, listed: ListedCheckpoint) -> dict[str, Mapping[str, StoredTensor]]:
        """Its tensors by group. Reads headers. Raises CheckpointError."""
        return {group: found for group in (*GROUPS, WEIGHTS) if (found := stored_tensors(Path(listed.path) / group))}

    def problems(self, listed: ListedCheckpoint) -> tuple[str, ...]:
        """What is wrong with it. Reads every byte."""
        return verify(Path(listed.path)).problems


Place = LocalPlace | RunPlace


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or path.name.startswith("step-")


def entries(path: Path) -> list[Entry]:
    """The checkpoints of a run directory, or in a folder. Raises UserError if there are none."""
    for root in (path / "checkpoints", path):
        if found := CheckpointStore(root).all():
            return found
    raise UserError(f"no checkpoint found in {path}", fix="give a run directory or one of its checkpoints")


def newest(path: Path) -> Path:
    """The checkpoint at `path`; for a run directory, its newest one that can be used."""
    if is_checkpoint(path):
        return path
    found = entries(path)
    return next((entry.path for entry in reversed(found) if entry.manifest), found[-1].path)


def _listed(entry: Entry) -> ListedCheckpoint:
    return ListedCheckpoint(
        name=entry.path.name, path=str(entry.path), step=entry.step, manifest=entry.manifest, problem=entry.problem
    )
