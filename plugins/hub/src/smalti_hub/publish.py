"""From a run or an export to a repository: what is published, and the note in the run directory of what was."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from smalti import UserError
from smalti.plugins import load_plugins, selection_of
from smalti.rundir import RunDirectory
from smalti.system import load_json, read_regular
from smalti_hub.upload import MODULAR_INDEX, Pushed, known_as, push

if TYPE_CHECKING:
    from smalti_export.inference_export import Exported

FOLDER = "hub"
"""In the run directory: the log of uploads, and what was published last. Exports are there while they are sent."""
LOG = "push.log"
_PUBLISHED = "published.json"
_ODD = re.compile(r"[^\w.-]+|--+|\.\.+")


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was published last from a run."""

    repository: str
    step: int
    url: str

    @classmethod
    def of(cls, directory: Path) -> Published | None:
        """The note in a run directory; None without one."""
        try:
            return cls(**load_json(read_regular(directory / FOLDER / _PUBLISHED)))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, directory: Path) -> None:
        path = directory / FOLDER / _PUBLISHED
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def default_name(directory: Path) -> str:
    """A name for the repository of a run: that of its directory, without characters that the Hub refuses."""
    return _ODD.sub("-", directory.resolve().name).strip("-.") or "smalti"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a run is exported, in the terms of `smalti checkpoint export`. None takes its default."""

    step: int | Literal["best"] | None = None
    averaged: bool | None = None
    format: str | None = None


def publish(
    path: Path, repository: str | None, choice: Choice, *, private: bool, report: Callable[[str], None] = lambda sentence: None
) -> Pushed:
    """Upload an export, or the export of a run or checkpoint, which is made and removed again.

    `repository` is "USER/NAME" or "NAME"; None stands for the name of the folder. Raises UserError; files that were
    sent by then are not sent again.
    """
    run = RunDirectory.containing(path)
    if run is None:
        _check_export(path, choice)
        name = repository or default_name(path)
        report(f"uploading {path} to {name}")
        return push(path, name, private=private, message=f"Upload of {path.resolve().name}")
    name = repository or default_name(run.path)
    (run.path / FOLDER).mkdir(exist_ok=True)
    with TemporaryDirectory(dir=run.path / FOLDER, prefix="export-") as folder:
        done = _export(path, Path(folder) / default_name(run.path), choice, known_as(name), report)
        report(f"uploading the export of step {done.step} to {name}")
        pushed = push(done.path, name, private=private, message=f"Step {done.step}")
    Published(repository=pushed.repository, step=done.step, url=pushed.url).write(run.path)
    return pushed


def _export(path: Path, target: Path, choice: Choice, name: str, report: Callable[[str], None]) -> Exported:
    from smalti.checkpoint import ExportRequest
    from smalti_export.inference_export import export

    return export(
        path,
        target,
        load_plugins(selection_of((), None, os.environ), strict=False),
        step=choice.step,
        averaged=choice.averaged,
        request=ExportRequest(format=choice.format),
        known_as=name,
        report=report,
    )


def _check_export(path: Path, choice: Choice) -> None:
    """Raises UserError for a folder that is neither a run nor an export."""
    if choice != Choice():
        raise UserError(f"{path} is not a run", fix="leave out --step, --ema, --raw and --format, or name a run directory")
    if not any((path / name).is_file() for name in ("model_index.json", MODULAR_INDEX)) and not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} is neither a run nor an export: it has no launch.json, no model_index.json and no .safetensors file",
            fix="name a run directory, or a folder that `smalti checkpoint export` wrote",
        )
