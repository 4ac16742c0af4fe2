"""Parse the arguments of `smalti train` (and `smalti config show`, ...) into plugins, options and one Config."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smalti.cli.pages.help import dashed
from smalti.config import SCHEDULER, Config, DataOptions, LaunchOptions, Schema, draft, refuse_other_trainers, resolve
from smalti.errors import InvalidOptionError, UserError
from smalti.plugins import Plugins, load_plugins, schema_of, selection_of


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line split into its configuration file, the plugins it selects, and its flags."""

    file: Path | None
    flags: tuple[str, ...]
    plugins: Plugins
    schema: Schema

    @classmethod
    def parse(cls, args: Sequence[str]) -> CommandLine:
        """Parse `[CONFIG] [--flags]` or `[--flags] --config CONFIG`. Loads the selected plugins, resolves no option yet."""
        file, flags = _split_file(args)
        if file is not None:
            refuse_other_trainers(file, "options")
        plugins = load_plugins(selection_of(flags, file, os.environ))
        return cls(file=file, flags=tuple(flags), plugins=plugins, schema=schema_of(plugins))

    def config(self) -> Config:
        """The resolved configuration. Raises ConfigError with all problems."""
        return _with_own_datasets(resolve(self.schema, self.flags, file=self.file))

    def without(self, *names: str) -> list[str]:
        """The configuration file, if there is one, and the flags but those of these options."""
        kept, rest = ([str(self.file)] if self.file is not None else []), list(self.flags)
        while rest:
            word = rest.pop(0)
            flag, joined, _ = word.partition("=")
            words, option = [word], self.schema.find(flag) if flag.startswith("--") else None
            if option is not None and not joined and rest and not option.is_flag and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            kept += words if option is None or option.name not in names else []
        return kept

    def of_nodes(self, config: Config) -> list[str]:
        """The command of each node, if there are several. Those of a scheduler are equal: it says which node runs them."""
        nodes = config[LaunchOptions].num_machines
        if nodes == 1:
            return []
        if config.source("machine_rank").startswith(SCHEDULER):
            return [shlex.join(["smalti", "train", *self.without()])] * nodes
        words = self.without("machine_rank")
        for name in ("num_machines", "num_processes", "main_process_ip", "main_process_port"):
            if config.source(name).startswith("environment"):
                words.append(f"--{name}={config.value(name)}")
        return [shlex.join(["smalti", "train", *words, f"--machine_rank={node}"]) for node in range(nodes)]

    def draft(self) -> Config:
        """The configuration with its problems included, so that further checks can add to them."""
        return _with_own_datasets(draft(self.schema, self.flags, file=self.file))


def _with_own_datasets(config: Config) -> Config:
    """The configuration. Raises UserError if its dataset file is one of another trainer."""
    with suppress(InvalidOptionError):  # reported with the other problems
        if (path := config[DataOptions].data_backend_config) is not None:
            refuse_other_trainers(path, "datasets")
    return config


def _split_file(args: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, which is the first argument or the value of --config, and the other arguments."""
    files: list[str] = []
    rest = list(args)
    if rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    flags = []
    while rest:
        arg = rest.pop(0)
        flag, joined, text = arg.partition("=")
        if flag.lower() != "--config":
            flags.append(arg)
        else:
            follows = not joined and bool(rest) and not rest[0].startswith("--")
            files.append(rest.pop(0) if follows else text)
    if "" in files:
        raise UserError("--config needs a file", fix="--config=FILE")
    if len(files) > 1:
        raise UserError(f"two configuration files are given: {files[0]} and {files[1]}", fix="give one of them")
    return (Path(files[0]).expanduser() if files else None), flags


def pop_flag(args: list[str], *names: str) -> bool:
    """Remove a flag with one of these names, in any spelling, from `args`. Returns whether there was one."""
    before = len(args)
    args[:] = [arg for arg in args if dashed(arg) not in names]
    return len(args) < before
