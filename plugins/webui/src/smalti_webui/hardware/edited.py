"""The draft that the hardware and launch pages show and change, as they see it: values, problems, a file for commands."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from smalti import Config, InvalidOptionError, Problem, UserError
from smalti.config import LaunchOptions, Option, RunOptions, Schema, draft as resolved
from smalti.plugins import Plugins, Selection, load_plugins, plugin_problems, schema_of, selection_of
from smalti_webui.configs.drafts import Draft
from smalti_webui.server.processes import environment
from smalti_webui.server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One option as a field of a form. `value` is what is given or the default, as text; `shown` says what `auto` means."""

    option: Option
    value: str
    given: bool
    error: str = ""

    @property
    def kind(self) -> str:
        """The kind of control."""
        if self.option.is_flag:
            return "switch"
        if self.option.choices:
            return "select"
        return "number" if self.option.kind in ("integer", "number") else "text"


@lru_cache(maxsize=8)
def _plugins_for(selection: Selection) -> tuple[Plugins, Schema]:
    """The plugins that a configuration selects, and their options. Loading them takes a tenth of a second."""
    plugins = load_plugins(selection, strict=False)
    return plugins, schema_of(plugins)


class Edited:
    """A draft with its resolved configuration. `config` has its problems, those of the plugins included."""

    def __init__(self, draft: Draft, settings: Settings) -> None:
        self.draft = draft
        self.settings = settings
        self.values: Mapping[str, object] = draft.values
        plugins, self.schema = _plugins_for(selection_of((), draft.file, os.environ))
        self.plugins = plugins
        self.config: Config = resolved(self.schema, file=draft.file, environment=environment())
        found = [*self.config.problems, *plugin_problems(self.config, plugins)]
        self.problems: Sequence[Problem] = [self._named(each) for each in found]

    @property
    def file(self) -> str:
        """What the draft says now, for commands."""
        return str(self.draft.file)

    def named(self, text: str) -> str:
        """A text of a command with the name of the draft in place of its file."""
        return text.replace(self.file, self.draft.target or f"{self.draft.name}.toml")

    def _named(self, problem: Problem) -> Problem:
        parts = {"message": problem.message, "where": problem.where, "fix": problem.fix}
        return replace(problem, **{name: self.named(text) for name, text in parts.items()})  # type: ignore[arg-type]

    def effective(self, name: str) -> object:
        """The value that a run would have; what is given, if that is not valid."""
        try:
            return self.config.value(name)
        except (InvalidOptionError, KeyError):  # what was given is shown then
            return self.values.get(name)

    def field(self, name: str) -> OptionField | None:
        """An option as a field; None if no plugin declares it."""
        option = self.schema.options.get(name)
        if option is None:
            return None
        given = name in self.values
        value = self.values[name] if given else self.effective(name)
        errors = [each for each in self.problems if each.option == name or _names(each.where, name)]
        error = "; ".join(f"{each.message}{f' (fix: {each.fix})' if each.fix else ''}" for each in errors)
        return OptionField(option=option, value=as_text(value), given=given, error=error)

    def other_problems(self, names: Sequence[str]) -> list[Problem]:
        """The problems that none of these fields shows."""
        return [each for each in self.problems if not any(each.option == name or _names(each.where, name) for name in names)]

    def changes_from(self, form: Mapping[str, str], names: Sequence[str]) -> dict[str, object]:
        """What a form with these fields changes: texts that are valid become values, a default removes what was given."""
        changes: dict[str, object] = {}
        for name in names:
            shown = self.field(name)
            if shown is None:
                continue
            text = form.get(name, "" if shown.kind != "switch" else "false").strip()
            if text == shown.value or (shown.kind == "switch" and text == ("true" if shown.value == "true" else "false")):
                continue
            value = _read(shown.option, text)
            changes[name] = None if text == "" or value == shown.option.default else value
        return {name: value for name, value in changes.items() if value is not None or name in self.values}

    def set(self, changes: Mapping[str, object]) -> None:
        """Change options of the draft; None removes one."""
        if changes:
            self.draft.set(dict(changes))

    @property
    def output_dir(self) -> Path | None:
        """The run directory, if the draft names one."""
        value = self._valid(RunOptions, "output_dir")
        return (self.draft.folder / value) if isinstance(value, Path) else None

    @property
    def local_ranks(self) -> int:
        """Ranks on this node."""
        ranks, nodes = self._valid(LaunchOptions, "num_processes"), self._valid(LaunchOptions, "num_machines")
        return max(1, int(str(ranks or 1)) // int(str(nodes or 1)))

    @property
    def on_cpu(self) -> bool:
        return bool(self._valid(LaunchOptions, "use_cpu"))

    def _valid(self, group: type, name: str) -> object:
        try:
            return getattr(self.config[group], name)
        except (InvalidOptionError, KeyError):
            return None


def as_text(value: object) -> str:
    """A value as a form has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read(option: Option, text: str) -> object:
    """The value of a text; the text itself if it is not valid, so that the field shows it with the error."""
    try:
        value = option.check(text)
    except (ValidationError, UserError, ValueError):
        return text
    return list(value) if isinstance(value, tuple) else value


def _names(where: str, name: str) -> bool:
    """Whether the place of a problem is this option: a flag, a key of a file."""
    word = where.partition(" ")[0].lstrip("-").partition("=")[0]
    return word == name
