"""Where `smalti checkpoint` finds checkpoints: in folders, or behind URLs such as s3://BUCKET/RUN. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    STATE,
    WEIGHTS,
    CheckpointStore,
    Entry,
    ListedCheckpoint,
    RunPlace,
    State,
    StoredTensor,
    read_entry,
    read_state,
    stored_tensors,
    verify,
)
from smalti.errors import UserError
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
        return [
            ListedCheckpoint(
                name=each.path.name, path=str(each.path), step=each.step, manifest=each.manifest, problem=each.problem
            )
            for each in entries(self.path)
        ]

    def newest(self) -> ListedCheckpoint:
        """The newest one whose manifest can be used; without one the newest. Raises UserError if there is none."""
        found = self.checkpoints()
        return next((each for each in reversed(found) if each.manifest), found[-1])

    def best(self) -> str:
        """The name of the one with the best evaluation; "" if none was evaluated. Raises CheckpointError."""
        ranked, _ = CheckpointStore(entries(self.path)[0].path.parent).ranked()
        return ranked[0].path.name if ranked else ""

    def tensors(self, listed: ListedCheckpoint) -> dict[str, Mapping[str, StoredTensor]]:
        """Its tensors by group. Reads headers. Raises CheckpointError."""
        return {group: found for group in (*GROUPS, WEIGHTS) if (found := stored_tensors(Path(listed.path) / group))}

    def state(self, listed: ListedCheckpoint) -> State:
        """What is in it apart from tensors. Raises CheckpointError."""
        return read_state(Path(listed.path) / STATE)

    def problems(self, listed: ListedCheckpoint) -> tuple[str, ...]:
        """What is wrong with it. Reads every byte."""
        return verify(Path(listed.path)).problems


Place = LocalPlace | RunPlace


def entries(path: Path) -> list[Entry]:
    """The checkpoint at `path`, or those of a run directory or in a folder. Raises UserError if there are none."""
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        return [read_entry(path.resolve() if path.is_symlink() else path)]
    for root in (path / "checkpoints", path):
        if found := CheckpointStore(root).all():
            return found
    raise UserError(f"no checkpoint found in {path}", fix="give a run directory or one of its checkpoints")
