"""The built-in plugin that adds the core's commands, as other plugins add theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti.hookspecs import hookimpl

if TYPE_CHECKING:
    from smalti.types import CommandCollector


class Commands:
    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        add = commands.add_deferred
        add("smalti.cli.train:train", "Train a model, or resume its training.", section="Training")
        add("smalti.cli.run:run", "List, watch and control runs.", section="Training")
        add("smalti.cli.checkpoint:checkpoint", "List, verify and export checkpoints.", section="Training")
        add("smalti.cli.config:config", "Show, explain and convert the configuration.", section="Configuration")
        add("smalti.cli.plugins:plugins", "List plugins and what each adds.", section="Configuration")


plugin = Commands()
