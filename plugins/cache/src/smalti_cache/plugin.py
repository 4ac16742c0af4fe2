"""The cache in which a run keeps what it encodes before training, and `smalti cache`. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CacheEntry, CommandCollector, hookimpl

if TYPE_CHECKING:
    from smalti import OptionGroup

CACHE = CacheEntry(
    name="encodings",
    title="encoded images and captions",
    encoder="smalti_cache.encode_ahead:open_encoder",
    order="smalti_cache.block_order:block_order",
)


class EncodingCache:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti import OptionGroup
        from smalti_cache.options import CacheOptions

        return [OptionGroup(name="cache", title="Cache", options=CacheOptions)]

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        return [CACHE]

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_cache.all_caches:cache", "Fill, list, verify and remove caches.", section="Data")


plugin = EncodingCache()
