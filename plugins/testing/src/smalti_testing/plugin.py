"""The commands for authors of plugins. Their modules are imported when they are used."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class Testing:
    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_testing.new_plugin:plugin", "Create a plugin package.", section="Configuration")


plugin = Testing()
