"""{env:NAME} in values of options: what files, events and names hold in place of what the environment has.

Every process of a run takes the values from its own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from smalti.configfile import variables_in
from smalti.options import Given, Schema
from smalti.settings import PluginOptions

SHORTEST = 8
"""Characters of what is masked wherever it occurs. Shorter texts occur everywhere, and are no secrets."""


@dataclass(frozen=True, kw_only=True)
class References:
    """What {env:NAME} stands for in a configuration. `values` are those options as they were written."""

    values: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, schema: Schema, given: Mapping[str, Given], environment: Mapping[str, str]) -> References:
        """Of texts; numbers and choices are no secrets. Plugins are named in full: they are loaded before options are read."""
        written = {
            name: each.written
            for name, each in given.items()
            if each.written is not None and schema.options[name].holds_text and name not in PluginOptions.model_fields
        }
        names = variables_in(written)
        return cls(values=written, variables={name: environment[name] for name in sorted(names) if environment.get(name)})

    def masked(self, value: object) -> object:
        """Text, at any depth, in which {env:NAME} stands for what the environment has."""
        if isinstance(value, Mapping):
            return {self.masked(key): self.masked(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.masked(each) for each in value]
        if isinstance(value, PurePath):
            value = str(value)
        if isinstance(value, str):
            for name, text in sorted(self.variables.items(), key=lambda item: -len(item[1])):  # one may be a part of another
                value = value.replace(text, f"{{env:{name}}}") if len(text) >= SHORTEST else value
        return value
