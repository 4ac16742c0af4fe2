"""How plugins add commands to `smalti`: the group that `register_commands` receives."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import click

from smalti.errors import UserError


class Deferred(click.Command):
    """A command that is imported when it is used. `section` is its heading in the list of commands; empty: "From plugins"."""

    def __init__(self, address: str, summary: str, section: str) -> None:
        super().__init__(address.rpartition(":")[2].strip("_").replace("_", "-"), help=summary, short_help=summary)
        self.address, self.section = address, section

    def load(self) -> click.Command:
        """The command itself."""
        command: click.Command = resolve_name(self.address)
        return command

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        return self.load().make_context(*arguments, **settings)


class CommandCollector(click.Group):
    """The group that `register_commands` receives. It refuses duplicate names."""

    def __init__(self) -> None:
        super().__init__()
        self._below: dict[str, CommandCollector] = {}

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name
        if name in self.commands:
            raise UserError(f"the command {name!r} already exists", fix="disable the plugin with --without")
        super().add_command(cmd, name)

    def add_deferred(self, address: str, summary: str, *, section: str = "") -> None:
        """Add the command at "MODULE:NAME", which is imported when it is used; `summary` stands in the list of commands."""
        self.add_command(Deferred(address, summary, section))

    def below(self, name: str) -> CommandCollector:
        """What takes further subcommands of a group of the core, such as "config"."""
        return self._below.setdefault(name, CommandCollector())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.commands.get(cmd_name)
        return command.load() if isinstance(command, Deferred) else command
