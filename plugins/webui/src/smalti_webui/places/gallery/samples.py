"""The images that a run generated, as a table of prompts by steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from smalti import UserError
from smalti.rundir import Event, RunDirectory, read_events
from smalti.system import open_regular
from smalti_validation.png import image_settings
from smalti_webui.runs.images import Sample, images_of


@dataclass(kw_only=True)
class Row:
    """The images of one prompt at one size, by step. `prompt` is the latest text under this file name."""

    name: str
    prompt: str
    cells: dict[int, Sample] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    steps: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def count(self) -> int:
        return sum(len(row.cells) for row in self.rows)


def gallery(run: RunDirectory) -> Gallery:
    """All images that the events of the run name. A step that was made again shows its newest images."""
    rows: dict[str, Row] = {}
    for event in events_of_kind(run.events_file, "sample"):
        for each in images_of(event.fields.get("images"), event.step or 0):
            name = PurePosixPath(each.file).stem
            row = rows.setdefault(name, Row(name=name, prompt=each.prompt))
            row.prompt = each.prompt
            row.cells[each.step] = each
    steps = sorted({step for row in rows.values() for step in row.cells})
    return Gallery(steps=tuple(steps), rows=tuple(rows.values()))


def settings_of(file: Path) -> Mapping[str, str]:
    """The settings in an image: prompt, seed, step and so on; empty if it has none or cannot be read."""
    try:
        return image_settings(file)
    except UserError:
        return {}


def events_of_kind(file: Path, *kinds: str) -> Iterator[Event]:
    """The events of these kinds. Lines of other kinds are not parsed, so a long history costs little."""
    begins = re.compile(rb'\s*\{\s*"type"\s*:\s*"(' + "|".join(kinds).encode() + rb')"')
    offset, wanted = 0, []
    try:
        with open_regular(file) as lines:
            for line in lines:
                if begins.match(line):
                    wanted.append(offset)
                offset += len(line)
    except OSError:
        return
    for each in wanted:
        event = next(read_events(file, each), None)
        if event is not None and event.kind in kinds:
            yield event
