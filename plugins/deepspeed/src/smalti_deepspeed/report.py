"""Checks a DeepSpeed configuration without a run. Imports no torch, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from smalti import Config, ConfigError, Problem, UserError
from smalti.cli import CommandLine
from smalti.config import GROUPS, LaunchOptions, Schema
from smalti_deepspeed.checks import problems as problems_of
from smalti_deepspeed.config import resolved
from smalti_deepspeed.derived_options import implied
from smalti_deepspeed.parsing import Document, parse


@dataclass(frozen=True, kw_only=True)
class Report:
    """`options` are the values of smalti's options that lie in the configuration, as (key in it, value).

    `complete` is the configuration that DeepSpeed would get, if a run was given and nothing is wrong.
    """

    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    complete: Document | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "valid": not self.problems,
            "problems": [{"where": each.where, "message": each.message, "fix": each.fix} for each in self.problems],
            "notices": list(self.notices),
            "options": {name: {"value": value, "key": key} for name, (key, value) in self.options.items()},
            "complete": self.complete,
        }


def check_document(text: str, name: str) -> Report:
    """A configuration by itself: its syntax, its keys and values, what is replaced. `name` says where the text stands."""
    try:
        document = parse(text, name)
        if "deepspeed_config" in document:
            message = f"{name} is a configuration of smalti's, which has DeepSpeed's under deepspeed_config"
            return Report(problems=(Problem(message=message, fix=f"smalti train {name} --dry-run checks both"),))
        found = implied({"deepspeed_config": document})
    except UserError as error:
        return Report(problems=(Problem(message=error.message, fix=error.fix),))
    notices = tuple(f"{key} {remark}" for key, remark in found.notices)
    problems = tuple(replace(each, where=each.where.removesuffix(" in deepspeed_config")) for each in found.problems)
    return Report(problems=(*problems, *_unfit(found.values)), notices=notices, options=found.values)


def _unfit(values: Mapping[str, tuple[str, object]]) -> Iterator[Problem]:
    """What no run could have as the value of the option that it is."""
    options = Schema(GROUPS).options
    for name, (key, value) in values.items():
        option = options[name]
        try:
            option.check(value)
            reason = option.reject_reason(value)
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"])
        if reason:
            fix = " ".join(filter(None, (option.kind, option.bounds)))
            yield Problem(message=f"cannot be {value!r}, which is {name}: {reason[:1].lower()}{reason[1:]}", where=key, fix=fix)


def check_in_run(text: str, arguments: Sequence[str]) -> Report:
    """A configuration that is valid by itself as that of the run of `smalti train` with these arguments."""
    command_line = CommandLine.parse([*arguments, f"--deepspeed_config={text}"])
    try:
        config: Config = command_line.config()
    except ConfigError as error:
        return Report(problems=error.problems)
    found = implied({"deepspeed_config": text})
    problems = tuple(problems_of(config))
    complete = None if problems else resolved(config, world_size=config[LaunchOptions].num_processes)
    return Report(problems=problems, notices=config.notices, options=found.values, complete=complete)
