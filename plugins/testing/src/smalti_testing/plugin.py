"""The commands for authors of plugins. Their modules are imported when they are used."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class Testing:
    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_testing.new_plugin:plugin", "Create a plugin package.", section="Configuration")
        commands.below("config").add_deferred("smalti_testing.options_page:reference", "List every option, also as Markdown.")


plugin = Testing()
