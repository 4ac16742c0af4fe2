"""The defaults that a run keeps: those of the version that started it, so that a version with others continues the same run.

launch.json of the run directory has them, and the table [defaults] of its config.toml, which can be used for other directories.
A value from any source overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.system import load_json, read_regular

if TYPE_CHECKING:
    from smalti.rundir import RunDirectory

KEPT = "default when the run began"
"""Prefix of the source of a value that is the default of the version that started the run."""
TABLE = "defaults"
"""The table of a configuration file, and the entry of launch.json."""
_FIRST_DEFAULTS: Mapping[str, object] = {"mixed_precision": "bf16", "timestep_distribution": "uniform", "crop": False}
"""Defaults of the versions whose runs did not keep any, where later versions have others."""
_BEFORE_THE_OPTION: dict[str, object] = {"allow_tf32": False}
"""What versions without these options did, where the default does something else. They are in no list of such a run."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The defaults of a run by option, as JSON holds them, and for people what they are and where they stand."""

    values: Mapping[str, object] = field(default_factory=dict)
    place: str = ""
    label: str = KEPT


def kept_defaults(output_dir: object, content: Mapping[str, object], file: Path | None, notices: list[str]) -> Kept:
    """Those of the run that has made steps in the output directory; else those in the table of a configuration file, if any.

    `content` is what the file holds.
    """
    from smalti.rundir import RunDirectory

    if isinstance(output_dir, str | Path) and (found := _of_run(RunDirectory(output_dir), notices)) is not None:
        return found
    table = content.get(TABLE)
    return Kept(values=_BEFORE_THE_OPTION | table, place=f"[{TABLE}] in {file}") if isinstance(table, dict) else Kept()


def _of_run(directory: RunDirectory, notices: list[str]) -> Kept | None:
    try:
        if directory.latest("step") is None:
            return None
    except OSError:
        return None  # there is no run that could be read; whatever needs the directory will say so
    try:
        launch: object = load_json(read_regular(directory.launch_file))
    except (OSError, ValueError) as error:
        state = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
        notices.append(f"{directory.launch_file} is {state}, so defaults are those of this version, not of the run")
        return None
    match launch:
        case {"defaults": dict(values)}:
            return Kept(values=_BEFORE_THE_OPTION | values, place=str(directory.launch_file))
        case {"values": dict(values)}:
            # What was not the default has been given, and is left to whoever gives it again.
            former = {name: was for name, was in _FIRST_DEFAULTS.items() if values.get(name, was) == was}
            former |= {name: was for name, was in _BEFORE_THE_OPTION.items() if name not in values}
            return Kept(values=former, place=str(directory.launch_file))
    return None
