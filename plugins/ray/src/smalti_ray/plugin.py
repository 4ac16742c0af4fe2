"""What smalti asks of this package. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CommandCollector, ScanEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup

ENGINE = ScanEntry(
    name="ray",
    title="by workers of a Ray cluster",
    scan="smalti_ray.data.scan:scan_datasets",
    encode="smalti_ray.data.encode:encode_datasets",
)


class Ray:
    """Runs, scans and encodings on a Ray cluster."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_ray.data.options import GROUP

        return [GROUP]

    @hookimpl
    def configure_scan(self, config: Config) -> ScanEntry | None:
        from smalti_ray.data.options import EngineOptions

        return ENGINE if config[EngineOptions].engine == "ray" else None

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Start a run on a Ray cluster, and start it again where nodes come and go."
        commands.below("launch").add_deferred("smalti_ray.launch.command:ray", summary)


plugin = Ray()
"""The plugin of the entry point."""
