"""A draft as the flags of a command line, and the other way round."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from smalti import ConfigError, UserError
from smalti.config import Config, Schema, as_toml, draft as draft_of
from smalti_webui.configs.checking import Checked
from smalti_webui.configs.controls import is_hidden
from smalti_webui.configs.drafts import Draft
from smalti_webui.configs.schemas import own_environment
from smalti_webui.configs.toml_text import content_of, given, other_keys, unwrapped, with_values

COMMAND = "smalti train"


def flags_of(found: Checked, config: Config) -> list[str]:
    """The flags that give the same configuration as the text of a draft, without secrets.

    `config` is that text, read without variables of the environment. Values with a problem stay as they are written.
    """
    if not config.problems:
        values = config.values()
        # The environment and an Accelerate YAML are sources of the command line too; what they give is not repeated.
        mine = [
            name for name, source in config.sources.items() if not source.startswith(("environment", "Accelerate", "scheduler"))
        ]
        return [f"--{name}={_text(_written(found, name, values[name]))}" for name in mine if values.get(name) is not None]
    return [
        f"--{name}={_text(value)}" for name, value in found.given.items() if not is_hidden(found.schema.options[name], value)
    ]


def _written(found: Checked, name: str, value: object) -> object:
    """The value as the draft writes it, such as 32 for 32.0, if it is a number."""
    written = found.given.get(name)
    return written if isinstance(written, int | float) and written == value else value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def command_text(flags: Sequence[str]) -> str:
    """The command for a shell, with one flag on each line."""
    return " \\\n    ".join([COMMAND, *(shlex.quote(flag) for flag in flags)])


def split(text: str) -> list[str]:
    """The flags of a command as it is written for a shell. Raises UserError if its quotes are not closed."""
    try:
        words = [word for word in shlex.split(text) if word != "\n"]  # of a backslash at the end of a line
    except ValueError as error:
        raise UserError(f"this is not a command line: {error}", fix="close the quotes") from None
    return words[2:] if words[:2] == COMMAND.split() else words


def with_flags(text: str, schema: Schema, flags: Sequence[str]) -> str:
    """The text of a draft that gives the same configuration as these flags.

    What the text says already stays as it is written; options that the flags do not name are removed, except secrets. Raises
    ConfigError with the problems of the flags.
    """
    config = draft_of(schema, flags, environment=own_environment())
    if config.problems:
        raise ConfigError(config.problems)
    values = config.values()
    named = {name: values[name] for name, source in config.sources.items() if source.startswith("flag") and name in values}
    if other_keys(text, schema) or "defaults" in content_of(text):
        return as_toml(config)  # keys of another trainer, or a table of defaults: they say more than options
    changes: dict[str, object] = {}
    before = given(text, schema)
    for name, value in before.items():
        if name not in named and not is_hidden(schema.options[name], value):
            changes[name] = None
    changes |= {name: value for name, value in named.items() if not _same(schema, name, before, value)}
    return with_values(text, schema, changes)


def _same(schema: Schema, name: str, before: Mapping[str, object], value: object) -> bool:
    option = schema.options[name]
    try:
        return name in before and bool(option.check(unwrapped(before[name])) == option.check(value))
    except ValueError:
        return False


def draft_flags(draft: Draft, found: Checked) -> str:
    """The command of a draft, for a shell."""
    if found.broken:
        return ""
    return command_text(flags_of(found, draft_of(found.schema, file=draft.file, environment=own_environment())))
