"""The DeepSpeed builder: a form and a JSON text that follow each other. All JSON comes from `smalti deepspeed build`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import click

from smalti import CommandCollector, HookSpecs, Problem, UserError
from smalti.plugins import load_plugins
from smalti.system import load_json
from smalti_webui.hardware.json_places import line_in, line_of
from smalti_webui.server.processes import Result, run_cli

NAME = "deepspeed_config"
SECONDS = 60.0
_PLUGIN = "deepspeed"
_PLACES: Mapping[str, tuple[str, ...]] = {
    "stage": ("zero_optimization.stage",),
    "offload_optimizer": ("zero_optimization.offload_optimizer.device",),
    "offload_param": ("zero_optimization.offload_param.device",),
    "nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"),
    "optimizer": ("optimizer.type",),
    "learning_rate": ("optimizer.params.lr",),
    "scheduler": ("scheduler.type",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}
"""Where each choice of the form is in the JSON."""
_LABELS: Mapping[str, str] = {
    "stage": "ZeRO stage",
    "offload_optimizer": "Optimizer state on",
    "offload_param": "Parameters on",
    "nvme_path": "Folder on an NVMe drive",
    "optimizer": "Optimizer",
    "learning_rate": "Learning rate",
    "scheduler": "Schedule",
    "warmup_steps": "Warm-up steps",
    "gradient_accumulation_steps": "Gradient accumulation",
    "gradient_clipping": "Gradient clipping",
}
INHERITED: Mapping[str, str] = {
    "nvme_path": "offload_param_path",
    "optimizer": "optimizer",
    "learning_rate": "learning_rate",
    "scheduler": "lr_scheduler",
    "warmup_steps": "lr_warmup_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""The option of the run that decides what the form leaves open."""

Document = dict[str, object]
_KEPT = 100
_built: dict[tuple[str, ...], Result] = {}


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One choice of the builder. `choices` is empty for a free value."""

    name: str
    label: str
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """A problem with the JSON text, at a line if one is to blame. `where` is a key of it or a choice of the form."""

    message: str
    where: str = ""
    fix: str = ""
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Built:
    """The form and its JSON. `answers` are None if the text cannot be read."""

    text: str
    answers: Mapping[str, str] | None
    problems: tuple[LineProblem, ...] = ()
    notices: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the run that the JSON decides, as {"value", "key"}."""


@cache
def form_fields() -> tuple[FormField, ...]:
    """The choices, from the options of `smalti deepspeed build`. Raises UserError if the plugin is missing."""
    plugins = load_plugins(strict=False)
    commands = CommandCollector()
    if _PLUGIN in plugins.infos and plugins.infos[_PLUGIN].state == "active":
        plugins.call_one(_PLUGIN, HookSpecs.register_commands, commands=commands)
    group = commands.get_command(click.Context(commands), "deepspeed")
    if not isinstance(group, click.Group):
        raise UserError("DeepSpeed is not installed", fix="pip install smalti-deepspeed")
    found = []
    for each in group.commands["build"].params:
        if isinstance(each, click.Option) and each.name in _PLACES:
            wanted = str(each.metavar or "")
            choices = tuple(wanted.split("|")) if "|" in wanted else ()
            text = (each.help or "").partition(" [")[0]
            found.append(FormField(name=each.name, label=_LABELS[each.name], help=text, choices=choices))
    return tuple(found)


async def from_form(answers: Mapping[str, str], current: str = "") -> Built:
    """The JSON of a form. What was written by hand into `current` beyond the form remains."""
    kept = {name: text.strip() for name, text in answers.items() if name in _PLACES and text.strip()}
    before = answers_of(parsed(current)) if current.strip() else None
    made, base = await asyncio.gather(_build(kept), _build(before or {}))
    if made.json is None:
        return Built(text=current, answers=dict(answers), problems=tuple(_refusals(made)))
    document: Document = made.json
    if before is not None and isinstance(base.json, dict):
        document = merged(base.json, parsed(current) or {}, made.json)
    return await from_text(as_text(document), answers=answers)


async def from_text(text: str, answers: Mapping[str, str] | None = None) -> Built:
    """What a JSON text says: its problems by line, and the form that it gives."""
    checked = await run_cli(["deepspeed", "check", "-", "--json"], SECONDS, input=text)
    report = checked.json
    if not isinstance(report, dict) or "problems" not in report:
        return Built(text=text, answers=answers, problems=tuple(_refusals(checked)))
    problems = []
    for each in report["problems"]:
        message = str(each["message"])
        line = line_in(message) or line_of(text, str(each["where"]))
        problems.append(LineProblem(message=message, where=str(each["where"]), fix=str(each["fix"]), line=line))
    document = parsed(text)
    found = answers if answers is not None else answers_of(document) if document is not None else None
    return Built(
        text=text, answers=found, problems=tuple(problems), notices=tuple(report["notices"]), options=report["options"]
    )


def as_text(document: Mapping[str, object]) -> str:
    """As the command line prints it."""
    return json.dumps(document, indent=2) + "\n"


def answers_of(document: Mapping[str, object] | None) -> dict[str, str]:
    """The choices of the form that a JSON has; the form cannot say everything."""
    found: dict[str, str] = {}
    for name, places in _PLACES.items():
        for place in places:
            value = _at(document or {}, place)
            if value not in (None, "auto") and not isinstance(value, Mapping | list):
                found.setdefault(name, str(value))
    return found


def merged(base: Mapping[str, object], edited: Mapping[str, object], made: Mapping[str, object]) -> Document:
    """`made` with what was changed by hand from `base` to `edited`, where the form has not changed the same."""
    result: Document = dict(made)
    for key, value in edited.items():
        mine, before = made.get(key), base.get(key)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            result[key] = merged(before if isinstance(before, Mapping) else {}, value, mine)
        elif key not in base or (key in made and mine == before):
            result[key] = value
    for key in base:
        if key not in edited and made.get(key) == base[key]:
            result.pop(key, None)
    return result


def one_line(document: Mapping[str, object]) -> str:
    """As an option holds it."""
    return json.dumps(document)


async def _build(answers: Mapping[str, str]) -> Result:
    """The answer of the command line, which is always the same for the same choices."""
    flags = tuple(f"--{name}={value}" for name, value in sorted(answers.items()))
    if flags not in _built:
        while len(_built) >= _KEPT:
            _built.pop(next(iter(_built)))
        done = await run_cli(["deepspeed", "build", *flags], SECONDS)
        if done.json is None:
            return done
        _built[flags] = done
    return _built[flags]


def _refusals(result: Result) -> Sequence[LineProblem]:
    """The problems that a command has printed: a line for each, with its fix below."""
    found: list[LineProblem] = []
    for line in result.stderr.splitlines():
        text = line.strip()
        if text.startswith("- "):
            found.append(_refusal(text[2:]))
        elif text.startswith("fix: ") and found:
            found[-1] = LineProblem(message=found[-1].message, where=found[-1].where, fix=text[5:])
        elif text.startswith("smalti: error: ") and not text.endswith((" problem:", " problems:")):
            found.append(LineProblem(message=text.removeprefix("smalti: error: ")))
    return found or [LineProblem(message=f"smalti deepspeed ended with exit code {result.code}", fix=result.stderr[-500:])]


def _refusal(text: str) -> LineProblem:
    where, colon, message = text.partition(": ")
    return LineProblem(message=message, where=where) if colon and where in _PLACES else LineProblem(message=text)


def parsed(text: str) -> Document | None:
    """The object that a text is; None if it is not one."""
    try:
        value = load_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _at(document: Mapping[str, object], dotted: str) -> object:
    value: object = document
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def as_problem(each: LineProblem) -> Problem:
    """For the common list of problems."""
    where = f"line {each.line}" if each.line else each.where
    return Problem(message=each.message, where=where, fix=each.fix)
