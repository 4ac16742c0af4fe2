"""What the words after `smalti train` (and `smalti config show`, ...) mean: plugins, options, one Config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti.config import Config, Schema, draft, resolve
from smalti.errors import UserError
from smalti.plugins import Plugins, load_plugins, schema_of, selection_of


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line split into its configuration file, the plugins it selects, and its flags."""

    file: Path | None
    flags: tuple[str, ...]
    plugins: Plugins
    schema: Schema

    @classmethod
    def read(cls, words: Sequence[str]) -> CommandLine:
        """`[CONFIG] [--flags]` or `[--flags] --config CONFIG`. Loads the selected plugins; resolves nothing yet."""
        file, flags = _split_file(words)
        plugins = load_plugins(selection_of(flags, file, os.environ))
        return cls(file=file, flags=tuple(flags), plugins=plugins, schema=schema_of(plugins))

    def config(self) -> Config:
        """Raises ConfigError with every problem at once."""
        return resolve(self.schema, self.flags, file=self.file)

    def draft(self) -> Config:
        """The same with its problems in it, to be looked through for more."""
        return draft(self.schema, self.flags, file=self.file)


def _split_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, as the first word or after --config, and the other words."""
    files: list[str] = []
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    flags = []
    while rest:
        word = rest.pop(0)
        flag, joined, text = word.partition("=")
        if flag.lower() != "--config":
            flags.append(word)
        elif joined or (rest and not rest[0].startswith("--")):
            files.append(text if joined else rest.pop(0))
        else:
            raise UserError("--config needs a file", fix="--config=FILE")
    if len(files) > 1:
        raise UserError(f"two configuration files are given: {files[0]} and {files[1]}", fix="give one of them")
    if files == [""]:
        raise UserError("--config needs a file", fix="--config=FILE")
    return (Path(files[0]).expanduser() if files else None), flags


def pop_flag(words: list[str], *names: str) -> bool:
    """Whether one of these switches is among the words; it is removed."""
    found = [word for word in words if word.replace("_", "-") in names]
    for word in found:
        words.remove(word)
    return bool(found)
