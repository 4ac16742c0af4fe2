"""What differs between the configurations of runs, and images of the same prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smalti.config import Schema
from smalti.rundir import RunDirectory
from smalti.system import load_json, load_toml, read_regular
from smalti_webui.places.gallery.samples import Gallery
from smalti_webui.runs.images import Sample

_OF_ONE_RUN = ("output_dir",)
"""Options that always differ."""
_MOST_BYTES = 4 << 20
_SECRET = re.compile(r"(?i)token|secret|passw|credential|key|webhook|auth")
"""Of an option of a plugin that is not installed, only the name is known."""
MASKED = "***"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An option with its value in each run, as text; None in a run that does not have it."""

    option: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The images of one prompt, one of each run; None in a run without it."""

    name: str
    prompt: str
    images: tuple[Sample | None, ...]


def differences(runs: Sequence[RunDirectory], schema: Schema) -> list[Difference]:
    """The options whose values are not the same in all runs. Secrets are masked."""
    found = [values_of(run) for run in runs]
    names = [name for name in dict.fromkeys(name for values in found for name in values) if name not in _OF_ONE_RUN]
    differing = [name for name in names if len({_text(values.get(name)) for values in found}) > 1]
    return [Difference(option=name, values=tuple(_shown(name, values, schema) for values in found)) for name in differing]


def values_of(run: RunDirectory) -> Mapping[str, object]:
    """All options of the last launch with their values; those of config.toml in a run without launch.json."""
    try:
        if run.launch_file.stat().st_size <= _MOST_BYTES:
            content = load_json(read_regular(run.launch_file))
            if isinstance(content, dict) and isinstance(values := content.get("values"), dict):
                return values
    except (OSError, ValueError):
        pass
    try:
        return load_toml(read_regular(run.config_file).decode())
    except (OSError, ValueError):
        return {}


def beside(galleries: Sequence[Gallery], step: int) -> list[Beside]:
    """The images of a step by prompt, for prompts that at least one run has there. Prompts are matched by their file names."""
    rows = [{row.name: row for row in each.rows} for each in galleries]
    found = []
    for name in dict.fromkeys(name for each in rows for name in each):
        images = tuple(each[name].cells.get(step) if name in each else None for each in rows)
        if any(images):
            prompt = next(each[name].prompt for each in rows if name in each)
            found.append(Beside(name=name, prompt=prompt, images=images))
    return found


def shown_steps(galleries: Sequence[Gallery]) -> list[int]:
    """The steps that all runs with images have; those of any run if there are none."""
    sets = [set(each.steps) for each in galleries if each.steps]
    common = set.intersection(*sets) if sets else set()
    return sorted(common or set().union(*sets))


def _shown(name: str, values: Mapping[str, object], schema: Schema) -> str | None:
    if name not in values:
        return None
    option = schema.find(name)
    hidden = option.is_secret(values[name]) if option is not None else _SECRET.search(name) is not None
    return MASKED if hidden else _text(values[name])


def _text(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
