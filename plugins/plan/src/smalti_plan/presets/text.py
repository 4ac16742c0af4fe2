"""A planned configuration as a TOML file with comments, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import tomlkit

from smalti.config import toml_item
from smalti_plan.presets.choosing import Planned
from smalti_plan.presets.defaults import Line
from smalti_plan.report import described

SCHEMA = 1
"""Of `as_json`. It grows if a key changes or goes; keys may be added without that."""
_GIB = 2**30


def as_toml(planned: Planned, words: list[str]) -> str:
    """The text of the file. `words` is the command that makes it again."""
    parts = ["\n".join(f"# {line}" for line in _head(planned, words))]
    parts += [f"# {title}\n{_lines(lines)}" for title, lines in planned.lines.items()]
    return "\n\n".join(parts) + "\n"


def _head(planned: Planned, words: list[str]) -> Iterator[str]:
    request = planned.request
    kind = "A LoRA of" if request.goal == "lora" else "All weights of"
    yield f"{kind} {request.entry.title} on {request.where}, by smalti {version('smalti')}:"
    yield f"  {shlex.join(words)}"
    yield f"{memory_of(planned)}."
    yield f"{time_of(planned)}. Both by formula; nothing was measured."
    yield from (f"Note: {notice}." for notice in planned.notices)
    yield "Check it with `smalti train FILE --dry-run`, start it without --dry-run, compare other ways with `smalti plan FILE`."


def memory_of(planned: Planned) -> str:
    """The planned peak, in words."""
    fit = planned.choice.fit
    each = " on each GPU" if planned.request.gpus > 1 else ""
    return f"Memory at the peak: {fit.least / _GIB:.1f} to {fit.most / _GIB:.1f} of {fit.memory / _GIB:.1f} GiB{each}"


def time_of(planned: Planned) -> str:
    """The planned time of a step and of the run, in words."""
    choice, steps = planned.choice, planned.steps
    least, most = choice.fastest.seconds, choice.slowest.seconds
    hours = f"{least * steps / 3600:.2g} to {most * steps / 3600:.2g} hours"
    return f"Time: {least:.2g} to {most:.2g} s a step, {hours} for {steps} steps"


def _lines(lines: Mapping[str, Line]) -> str:
    table = tomlkit.document()
    for name, line in lines.items():
        item = toml_item(line.value)
        if line.why:
            item.comment(line.why)
        table.add(name, item)
    return tomlkit.dumps(table).rstrip("\n")


def as_json(planned: Planned, text: str, file: str | None) -> dict[str, object]:
    """Everything for programs. `file` is where the text was written."""
    request = planned.request
    return {
        "schema": SCHEMA,
        "model": {
            "family": request.entry.name,
            "title": request.entry.title,
            "weights": request.weights,
            "gated": request.is_gated,
        },
        "device": {"name": request.device.name, "title": request.device.title, "memory": request.device.memory},
        "values": {
            name: {"value": line.value, "why": line.why} for section in planned.lines.values() for name, line in section.items()
        },
        "plan": described(planned.choice),
        "steps": planned.steps,
        "notices": list(planned.notices),
        "file": file,
        "toml": text,
    }
