"""The resolved configuration of a run with the source of each value, and its differences to another run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from smalti.rundir import RunDirectory
from smalti.system import read_regular
from smalti_webui.runs.actions import launched_values

_SOURCE = re.compile(r"^(?P<name>[A-Za-z0-9_]+) = .* # (?P<source>[^#]+)$")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value as text. `other` is that of the run it is compared with; None if they are not compared."""

    name: str
    text: str
    source: str
    other: str | None = None

    @property
    def differs(self) -> bool:
        return self.other is not None and self.other != self.text


def values(directory: RunDirectory, other: RunDirectory | None = None) -> list[Value]:
    """All values, those that were set first. With `other`, those that differ first."""
    own = {name: _text(value) for name, value in launched_values(directory).items()}
    sources = _sources(directory.config_file)
    others = None if other is None else {name: _text(value) for name, value in launched_values(other).items()}
    names = [*own, *(name for name in others or () if name not in own)]
    found = [
        Value(
            name=name,
            text=own.get(name, ""),
            source=sources.get(name, "default" if name in own else "not an option there"),
            other=None if others is None else others.get(name, ""),
        )
        for name in names
    ]
    if others is None:
        return sorted(found, key=lambda value: value.source == "default")
    return sorted(found, key=lambda value: not value.differs)


def _sources(file: Path) -> dict[str, str]:
    """Where values come from: the comments that smalti writes in config.toml."""
    try:
        lines = read_regular(file).decode(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        if line == "[defaults]":
            break
        if match := _SOURCE.match(line):
            found[match["name"]] = match["source"].strip()
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
