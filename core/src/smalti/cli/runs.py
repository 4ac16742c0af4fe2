"""The built-in plugin that adds the command `smalti run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


class Runs:
    @hookimpl
    def register_commands(self, commands: click.Group) -> None:
        from smalti.cli.run import run

        commands.add_command(run)


plugin = Runs()
