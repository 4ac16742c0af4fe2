"""Registers the cache in which a run keeps what it encodes before training. Imports no torch."""

from __future__ import annotations

from smalti import CacheEntry, CommandCollector, OptionGroup, hookimpl
from smalti_cache.options import CacheOptions

CACHE = CacheEntry(
    name="encodings",
    title="encoded images and captions",
    factory="smalti_cache.commands:Encodings",
    divided=True,
    encoder="smalti_cache.encode_ahead:open_encoder",
)


class EncodingCache:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return [OptionGroup(name="cache", title="Cache", options=CacheOptions)]

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        return [CACHE]

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        below = commands.below("cache")
        below.add_deferred("smalti_cache.commands:encode", "Encode images and captions before a training, in shares.")
        below.add_deferred("smalti_cache.commands:verify", "Read every entry, and compare its checksum.")
        below.add_deferred("smalti_cache.commands:prune", "Remove the caches of encoders that were not used for some time.")


plugin = EncodingCache()
