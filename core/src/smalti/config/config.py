"""One validated, immutable configuration that knows where each value came from.

Values may contain {env:NAME}. Every process of a run takes the value from its own environment; files, events and names keep the
reference in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TypeVar, cast

from pydantic import ValidationError

from smalti.config.core_options.run import PluginOptions
from smalti.config.files import read_text, variables_in
from smalti.config.kept_defaults import Kept
from smalti.config.options import Given, Options, Schema, invalidated
from smalti.config.sources import variable
from smalti.errors import InvalidOptionError, Problem, UserError

FILES = ("data_backend_config",)
"""Options that name a file in which {env:NAME} is replaced too."""
SHORTEST = 8
"""The fewest characters of a value that is masked wherever it occurs. Shorter texts are common and no secrets."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The uses of {env:NAME} in a configuration and its files. `values` are those options as they were written."""

    values: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, schema: Schema, given: Mapping[str, Given], environment: Mapping[str, str]) -> References:
        """The references in text options. Numbers and choices are no secrets; plugins are loaded before options are read."""
        written = {
            name: each.written
            for name, each in given.items()
            if each.written is not None and schema.options[name].holds_text and name not in PluginOptions.model_fields
        }
        names = variables_in(written) | variables_in([_text(given[name].value) for name in FILES if name in given])
        return cls(values=written, variables={name: environment[name] for name in sorted(names) if environment.get(name)})

    def masked(self, value: object) -> object:
        """The value with {env:NAME} in place of what the environment has for it, in texts at any depth."""
        if isinstance(value, Mapping):
            return {self.masked(key): self.masked(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.masked(each) for each in value]
        if isinstance(value, PurePath):
            value = str(value)
        if isinstance(value, str):
            for name, text in sorted(self.variables.items(), key=lambda item: -len(item[1])):  # one may contain another
                value = value.replace(text, f"{{env:{name}}}") if len(text) >= SHORTEST else value
        return value


def _text(path: object) -> str:
    """The text of a file; "" if it cannot be read, which is reported where the file is used."""
    try:
        return read_text(Path(str(path)).expanduser())
    except (UserError, RuntimeError, ValueError):  # also no such home folder, and no name that a file can have
        return ""


G = TypeVar("G", bound=Options)

AUTOMATIC = "auto: "
"""Prefix of the source of a value that replaced "auto"."""
PER_MACHINE = frozenset(("machine_rank", "accelerate_config"))
"""Options that may differ between the nodes of one run."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option's value. `config[TrainingOptions].max_grad_norm` is typed; `config.value("max_grad_norm")` is not."""

    schema: Schema
    groups: Mapping[type[Options], Options]
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    accelerate: Mapping[str, object] = field(default_factory=dict)
    """The content of the user's Accelerate YAML, to be merged into the launch; empty if there is none."""
    kept: Kept = field(default_factory=Kept)
    """The defaults of the version that started the run, if this configuration resumes one."""
    references: References = field(default_factory=References)
    problems: tuple[Problem, ...] = ()
    """Only a `draft` has problems. Reading an option that one of them is about raises InvalidOptionError."""

    def __getitem__(self, group: type[G]) -> G:
        return cast(G, self.groups[group])

    def __contains__(self, group: type[Options]) -> bool:
        return group in self.groups

    def value(self, name: str) -> object:
        return getattr(self.groups[self.schema.options[name].group.options], name)

    def source(self, name: str) -> str:
        """Where the value came from, for messages."""
        return self.sources.get(name, "default")

    def run_checks(self, *checks: Callable[[Config], Iterable[Problem]]) -> list[Problem]:
        """The problems that these checks find. A check that reads an invalid option is skipped."""
        found: list[Problem] = []
        for check in checks:
            with suppress(InvalidOptionError):
                found += check(self)
        return found

    def invalidated(self, problems: Iterable[Problem]) -> Config:
        """The same without values for the options that these problems are about: reading one raises InvalidOptionError."""
        return replace(self, groups=without_values(self.groups, problems))

    def values(self) -> dict[str, object]:
        """Every option's value in JSON's types, with {env:NAME} where it was written. Secrets are left out."""
        found: dict[str, object] = {}
        for group in self.groups.values():
            if invalidated := type(group).model_fields.keys() - vars(group).keys():
                raise InvalidOptionError(*sorted(invalidated))
            found |= group.model_dump(mode="json")
        found |= self.references.values
        return {name: value for name, value in found.items() if not self.schema.options[name].is_secret(value)}

    def changes(self) -> dict[str, object]:
        """The values that are not defaults: what a configuration file needs."""
        defaults = {name: value for kind in self.groups for name, value in kind()}
        return {name: value for name, value in self.values().items() if self.value(name) != defaults[name]}

    def shown(self, name: str) -> object:
        """The value with {env:NAME} where it was written: for files, names and messages."""
        written = self.references.values.get(name)
        if written is None:
            return self.value(name)
        try:
            return self.schema.options[name].check(written)
        except ValidationError:
            return written  # valid once {env:NAME} is replaced

    def masked(self, value: object) -> object:
        """The value with {env:NAME} in place of what the environment has for it, in texts at any depth."""
        return self.references.masked(value)

    def given(self) -> dict[str, object]:
        """The values that are neither defaults of this version nor defaults that the run keeps."""
        changed = self.changes()
        # A value that is the default here, and replaces another default of the run, counts as given.
        names = {name for name in self.values() if not self.is_default(name) and (name in changed or name in self.kept.values)}
        return {name: value for name, value in self.values().items() if name in names}

    def is_default(self, name: str) -> bool:
        """Whether a value is a default: of this version, of the run, or of the trainer whose file it is."""
        return self.source(name).startswith(("default", self.kept.label))

    def applies(self, name: str) -> bool:
        """Whether the option has an effect: its condition, if it has one, holds."""
        key, sign, wanted = (*self.schema.options[name].when.split(), "", "", "")[:3]
        if not key:
            return True
        value = self.value(key)
        if sign == "==" and value is None:
            return True  # the family chooses it, and may choose this value
        if sign == ">":
            return float(str(value)) > float(wanted)
        return str(value).lower() == wanted.lower() if sign else bool(value)

    def defaults(self) -> dict[str, object]:
        """The default of every option in this run: of the version that started it, else of this one."""
        own: dict[str, object] = {}
        for kind in self.groups:
            own |= kind().model_dump(mode="json")
        return {
            name: self.kept.values.get(name, value)
            for name, value in own.items()
            if not self.schema.options[name].is_secret(value)
        }

    def shared_values(self) -> dict[str, object]:
        """The values that are the same on every node of a run, which its workers get."""
        return {name: value for name, value in self.values().items() if name not in PER_MACHINE}

    def flags(self) -> list[str]:
        """The flags that give this configuration."""
        return [f"--{name}={_as_text(value)}" for name, value in self.changes().items()]

    def chosen(self, name: str, value: object, why: str) -> Config:
        """The same with a value in place of "auto", and the reason for it."""
        group = self.schema.options[name].group.options
        changed = self.groups[group].model_copy(update={name: value})
        return replace(self, groups={**self.groups, group: changed}, sources={**self.sources, name: AUTOMATIC + why})

    def secrets(self) -> dict[str, str]:
        """The secrets that are set, as environment variables: the only way in which they travel to the workers."""
        found = {}
        for name, option in self.schema.options.items():
            if option.secret is False or (value := self.value(name)) is None:
                continue
            if option.is_secret(self.references.values.get(name, value)):
                found[variable(name)] = str(value)
        return found

    @property
    def digest(self) -> str:
        """A hash of all values in 16 hex digits, by which ranks check that they train the same run."""
        return hashlib.sha256(json.dumps(self.shared_values(), sort_keys=True).encode()).hexdigest()[:16]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def without_values(groups: Mapping[type[Options], Options], problems: Iterable[Problem]) -> dict[type[Options], Options]:
    """The same without values for the options that problems are about."""
    names = {problem.option for problem in problems}
    return {kind: invalidated(made, names) for kind, made in groups.items()}
