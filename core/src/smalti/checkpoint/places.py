"""What `smalti checkpoint` and `--resume_from_checkpoint` ask of a run behind a URL. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from smalti.checkpoint.format.manifest import Manifest
from smalti.checkpoint.format.safetensors_layout import StoredTensor
from smalti.checkpoint.format.state_file import State
from smalti.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint. `path` is its path or URL; `problem` is why its manifest cannot be used, "" if it can."""

    name: str
    path: str
    step: int
    manifest: Manifest | None
    problem: str


class RunPlace(Protocol):
    """The checkpoints of a run behind a URL, or one of them. Creating it sends nothing. What it returns was verified."""

    @property
    def name(self) -> str:
        """The last part of the URL."""
        ...

    def checkpoints(self) -> list[ListedCheckpoint]:
        """All of them, lowest step first. Reads manifests only. Raises UserError if there are none."""
        ...

    def newest(self) -> ListedCheckpoint:
        """The newest one whose manifest can be used; without one the newest. Raises UserError if there is none."""
        ...

    def best(self) -> str:
        """The name of the one with the best evaluation; "" if none was evaluated. Raises CheckpointError."""
        ...

    def tensors(self, listed: ListedCheckpoint) -> dict[str, Mapping[str, StoredTensor]]:
        """Its tensors by group. Reads headers. Raises CheckpointError."""
        ...

    def state(self, listed: ListedCheckpoint) -> State:
        """What is in it apart from tensors. Raises CheckpointError."""
        ...

    def problems(self, listed: ListedCheckpoint) -> tuple[str, ...]:
        """What is wrong with it. Reads every byte."""
        ...

    def url_of(self, name: str) -> str:
        """The URL of a checkpoint with this name."""
        ...

    def downloaded(
        self, beside: Path, groups: Collection[str] | None, *, step: int | Literal["best"] | None = None
    ) -> AbstractContextManager[Path]:
        """Yields the newest checkpoint, that of a step, or the best, in a temporary run directory beside `beside`.

        With `groups`, only these groups of tensors. Raises UserError if there is no such checkpoint.
        """
        ...

    def check(self) -> None:
        """Raises CheckpointError if there is no checkpoint to resume from. Reads manifests, and writes nothing."""
        ...

    def bring(self, target: RunDirectory, report: Callable[[str], None]) -> Path:
        """Download the checkpoint to resume from into a run directory; returns its path, which `brought` finds."""
        ...

    def brought(self, target: RunDirectory) -> Path | None:
        """The checkpoint that was brought from this URL last; None if none was. Sends nothing."""
        ...
