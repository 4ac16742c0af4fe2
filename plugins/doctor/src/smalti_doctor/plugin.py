"""`smalti doctor`, and the cache of measured devices. Imports no torch."""

from __future__ import annotations

from smalti import CacheEntry, CommandCollector, hookimpl


class Doctor:
    """Active where it is installed; the checks are imported when they are used."""

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_doctor.command:doctor", "Check this node; each problem with its fix.", section="Node")
        summary = "Check a configuration: options, datasets, plugins, devices."
        commands.below("config").add_deferred("smalti_doctor.config_check:check", summary)

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        title, factory = "measured devices and disks, of smalti doctor", "smalti_doctor.measurements:speed_cache"
        return [CacheEntry(name="speed", title=title, factory=factory)]


plugin = Doctor()
