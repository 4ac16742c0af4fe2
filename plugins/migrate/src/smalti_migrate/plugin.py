"""Registers the spelling of SimpleTuner and the commands. What these need is imported when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CommandCollector, hookimpl

if TYPE_CHECKING:
    from smalti import OptionGroup


class Migrate:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_migrate.simpletuner.dialect import GROUPS

        return [*GROUPS]

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Convert files of another trainer to a configuration file."
        commands.below("config").add_deferred("smalti_migrate.commands:import_", summary)
        summary = "Show what a checkpoint contains."
        commands.below("checkpoint").add_deferred("smalti_migrate.checkpoints.inspection:inspect", summary)
        summary = "Convert a checkpoint to smalti's format or to safetensors."
        commands.below("checkpoint").add_deferred("smalti_migrate.checkpoints.command:convert", summary)


plugin = Migrate()
