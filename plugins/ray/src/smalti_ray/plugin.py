"""What smalti asks of this package. Imports neither torch nor Ray."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class Ray:
    """Runs on a Ray cluster."""

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Start a run on a Ray cluster, and start it again where nodes come and go."
        commands.below("launch").add_deferred("smalti_ray.launch.command:ray", summary)


plugin = Ray()
"""The plugin of the entry point."""
