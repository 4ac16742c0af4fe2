"""Registers the spelling of SimpleTuner and the commands. What these need is imported when they are used."""

from __future__ import annotations

from smalti import CommandCollector, OptionGroup, hookimpl
from smalti_migrate.simpletuner.dialect import GROUPS


class Migrate:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return [*GROUPS]

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Convert files of another trainer to a configuration file."
        commands.below("config").add_deferred("smalti_migrate.commands:import_", summary)
        summary = "Convert a checkpoint to smalti's format or to safetensors."
        commands.below("checkpoint").add_deferred("smalti_migrate.checkpoints.command:convert", summary)


plugin = Migrate()
