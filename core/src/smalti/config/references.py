"""{env:NAME} in values of options. Files, events and names keep it in place of the value from the environment.

Every process of a run takes the values from its own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from smalti.config.core_options.run import PluginOptions
from smalti.config.files import variables_in
from smalti.config.options import Given, Schema

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
        return Path(str(path)).expanduser().read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError, ValueError):  # also no such home folder, and no name that a file can have
        return ""
