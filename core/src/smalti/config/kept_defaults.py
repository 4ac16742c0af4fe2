"""Defaults that a run keeps: those of the version that began it, so that one with other defaults continues the same run.

They stand in launch.json of the run directory, and in the table [defaults] of its config.toml for whoever takes that elsewhere.
Values that any source gives override them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smalti.rundir import RunDirectory

TABLE = "defaults"
"""The table of a configuration file, and the entry of launch.json."""
_BEFORE: Mapping[str, object] = {"mixed_precision": "bf16", "timestep_distribution": "uniform", "crop": False}
"""Defaults of the versions whose runs did not keep any, where later ones have others."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The defaults of a run by option, as JSON holds them, and for people where they stand."""

    values: Mapping[str, object] = field(default_factory=dict)
    place: str = ""


def kept_defaults(output_dir: object, content: Mapping[str, object], file: Path | None, notices: list[str]) -> Kept:
    """Those of the run that has made steps in the output directory; else those in the table of a configuration file, if any.

    `content` is what the file holds.
    """
    if isinstance(output_dir, str | Path) and (found := _of_run(RunDirectory(output_dir), notices)) is not None:
        return found
    table = content.get(TABLE)
    return Kept(values=table, place=f"[{TABLE}] in {file}") if isinstance(table, dict) else Kept()


def _of_run(directory: RunDirectory, notices: list[str]) -> Kept | None:
    try:
        if directory.latest("step") is None:
            return None
        launch: object = json.loads(directory.launch_file.read_bytes())
    except OSError:
        return None  # there is no run that could be read; whatever needs the directory will say so
    except ValueError as error:
        notices.append(f"{directory.launch_file} is damaged, so defaults are those of this version, not of the run: {error}")
        return None
    match launch:
        case {"defaults": dict(values)}:
            return Kept(values=values, place=str(directory.launch_file))
        case {"values": dict(values)}:
            # What was not the default has been given, and is left to whoever gives it again.
            former = {name: was for name, was in _BEFORE.items() if values.get(name, was) == was}
            return Kept(values=former, place=str(directory.launch_file))
    return None
