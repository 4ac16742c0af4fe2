"""Adds `smalti ui`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import hookimpl

if TYPE_CHECKING:
    import click


class WebUI:
    """Only a command: the server is imported when it starts."""

    @hookimpl
    def register_commands(self, commands: click.Group) -> None:
        from smalti_webui.commands import ui

        commands.add_command(ui)


plugin = WebUI()
