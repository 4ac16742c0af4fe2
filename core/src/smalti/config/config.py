"""One validated, immutable configuration that knows where each value came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from pydantic import ValidationError

from smalti.config.kept_defaults import Kept
from smalti.config.options import Options, Schema, unsettled
from smalti.config.references import References
from smalti.config.sources import variable
from smalti.errors import Problem, Unsettled

G = TypeVar("G", bound=Options)

KEPT = "default when the run began"
"""How the source of a value begins that is the default of the version that began the run."""
AUTOMATIC = "auto: "
"""How the source of a value begins that took the place of "auto"."""
PER_MACHINE = frozenset(("machine_rank", "accelerate_config"))
"""Options in which the machines of one run may differ."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option's value. `config[TrainingOptions].max_grad_norm` is typed; `config.value("max_grad_norm")` is not."""

    schema: Schema
    groups: Mapping[type[Options], Options]
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    accelerate: Mapping[str, object] = field(default_factory=dict)
    """The user's Accelerate YAML as it stands, to be merged into the launch; empty if there is none."""
    kept: Kept = field(default_factory=Kept)
    """The defaults of the version that began the run, where it was begun before."""
    references: References = field(default_factory=References)
    problems: tuple[Problem, ...] = ()
    """What is wrong with it. Only a `draft` has any; reading the options that they are about raises Unsettled."""

    def __getitem__(self, group: type[G]) -> G:
        return cast(G, self.groups[group])

    def __contains__(self, group: type[Options]) -> bool:
        return group in self.groups

    def value(self, name: str) -> object:
        return getattr(self.groups[self.schema.options[name].group.options], name)

    def source(self, name: str) -> str:
        """Where the value came from, for people."""
        return self.sources.get(name, "default")

    def separately(self, *checks: Callable[[Config], Iterable[Problem]]) -> list[Problem]:
        """What these checks find, each by itself: one that needs an option whose value is not known finds nothing."""
        found: list[Problem] = []
        for check in checks:
            with suppress(Unsettled):
                found += check(self)
        return found

    def unsettled(self, problems: Iterable[Problem]) -> Config:
        """The same, in which options that these problems are about have no value: to read one raises Unsettled."""
        return replace(self, groups=without_values(self.groups, problems))

    def values(self) -> dict[str, object]:
        """Every option's value, as JSON would hold it, with {env:NAME} where it was written. Secrets are left out."""
        found: dict[str, object] = {}
        for group in self.groups.values():
            if unsettled := type(group).model_fields.keys() - vars(group).keys():
                raise Unsettled(*sorted(unsettled))
            found |= group.model_dump(mode="json")
        found |= self.references.values
        return {name: value for name, value in found.items() if not self.schema.options[name].secret}

    def changes(self) -> dict[str, object]:
        """The values that are not defaults: what a configuration file needs to hold."""
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
            return written  # what it stands for would do

    def masked(self, value: object) -> object:
        """Text, at any depth, in which {env:NAME} stands for what the environment has for it, where the options use it."""
        return self.references.masked(value)

    def given(self) -> dict[str, object]:
        """The values that are neither a default of this version nor one that the run keeps."""
        return {name: value for name, value in self.changes().items() if not self.source(name).startswith(KEPT)}

    def defaults(self) -> dict[str, object]:
        """The default of every option in this run: as the run was begun, else as this version has it."""
        own: dict[str, object] = {}
        for kind in self.groups:
            own |= kind().model_dump(mode="json")
        return {name: self.kept.values.get(name, value) for name, value in own.items() if not self.schema.options[name].secret}

    def shared_values(self) -> dict[str, object]:
        """The values that are the same on every machine of a run: what its workers are given."""
        return {name: value for name, value in self.values().items() if name not in PER_MACHINE}

    def flags(self) -> list[str]:
        """The flags that give this configuration again."""
        return [f"--{name}={_as_text(value)}" for name, value in self.changes().items()]

    def chosen(self, name: str, value: object, why: str) -> Config:
        """The same with a value in place of "auto", and why it is this one."""
        group = self.schema.options[name].group.options
        changed = self.groups[group].model_copy(update={name: value})
        return replace(self, groups={**self.groups, group: changed}, sources={**self.sources, name: AUTOMATIC + why})

    def secrets(self) -> dict[str, str]:
        """The secrets that are set, as environment variables: the only way in which they travel to the workers."""
        names = [option.name for option in self.schema.options.values() if option.secret]
        return {variable(name): str(value) for name in names if (value := self.value(name)) is not None}

    @property
    def digest(self) -> str:
        """Sixteen hex digits over all values: the same on every rank, or the ranks do not train the same run."""
        text = json.dumps(self.shared_values(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def without_values(groups: Mapping[type[Options], Options], problems: Iterable[Problem]) -> dict[type[Options], Options]:
    """The same, in which options that problems are about have no value."""
    names = {problem.option for problem in problems}
    return {kind: unsettled(made, names) for kind, made in groups.items()}
