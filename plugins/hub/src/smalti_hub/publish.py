"""From a run or an export to a repository: what is published, and the note in the run directory of what was."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import UserError
from smalti.plugins import Plugins, load_plugins, selection_of
from smalti.rundir import RunDirectory
from smalti_hub.upload import Pushed, known_as, push

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
            return cls(**json.loads((directory / FOLDER / _PUBLISHED).read_bytes()))
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


def run_of(path: Path) -> RunDirectory | None:
    """The run that a path is the directory or a checkpoint of; None for any other folder."""
    places = [path, path.resolve().parent.parent]
    return next((run for place in places if (run := RunDirectory(place)).launch_file.is_file()), None)


def publish(
    path: Path,
    repository: str | None,
    *,
    step: int | None,
    averaged: bool | None,
    format: str | None,
    private: bool,
    report: Callable[[str], None],
) -> Pushed:
    """Upload an export, or the export of a run or checkpoint, which is made and removed again. See `smalti hub push`."""
    run = run_of(path)
    if run is None:
        return _publish_export(path, repository, step=step, averaged=averaged, format=format, private=private, report=report)
    from smalti.checkpoint import ExportRequest
    from smalti.training import export

    plugins: Plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    name = repository or default_name(run.path)
    (run.path / FOLDER).mkdir(exist_ok=True)
    with TemporaryDirectory(dir=run.path / FOLDER, prefix="export-") as folder:
        done = export(
            path,
            Path(folder) / default_name(run.path),
            plugins,
            step=step,
            averaged=averaged,
            request=ExportRequest(format=format),
            known_as=known_as(name),
            report=report,
        )
        report(f"uploading the export of step {done.step} to {name}")
        pushed = push(done.path, name, private=private, message=f"Step {done.step}")
    Published(repository=pushed.repository, step=done.step, url=pushed.url).write(run.path)
    return pushed


def _publish_export(
    path: Path,
    repository: str | None,
    *,
    step: int | None,
    averaged: bool | None,
    format: str | None,
    private: bool,
    report: Callable[[str], None],
) -> Pushed:
    if step is not None or averaged is not None or format is not None:
        raise UserError(f"{path} is not a run", fix="leave out --step, --ema, --raw and --format, or name a run directory")
    if not (path / "model_index.json").is_file() and not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} is neither a run nor an export: it has no launch.json, no model_index.json and no .safetensors file",
            fix="name a run directory, or a folder that `smalti checkpoint export` wrote",
        )
    name = repository or default_name(path)
    report(f"uploading {path} to {name}")
    return push(path, name, private=private, message=f"Upload of {path.resolve().name}")
