"""Adds `smalti ui`."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class WebUI:
    """Only a command: the server is imported when it starts."""

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_webui.commands:ui", "The web page: configure, plan, launch, watch and compare runs.")


plugin = WebUI()
