"""Registers the command. What it needs is imported when it is used."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class Export:
    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Export a run or checkpoint for inference."
        commands.below("checkpoint").add_deferred("smalti_export.command:export", summary)


plugin = Export()
