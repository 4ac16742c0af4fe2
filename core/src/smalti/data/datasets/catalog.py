"""The registered storages and metadata backends, by name. Their modules are imported when they are first used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, create
from smalti.types import MetadataEntry, StorageEntry

if TYPE_CHECKING:
    from smalti.data.datasets.sources import MetadataSource
    from smalti.data.datasets.spec import DatasetSpec
    from smalti.data.storage.protocol import Storage

E = TypeVar("E", StorageEntry, MetadataEntry)

BUILT_IN_STORAGES = (StorageEntry(name="local", title="A folder", factory="smalti.data.storage.local:open_local"),)
BUILT_IN_METADATA = (
    MetadataEntry(name="discovery", title="The images themselves", factory="smalti.data.sources.discovery:Discovery"),
)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The entries by name."""

    storages: Mapping[str, StorageEntry] = field(default_factory=lambda: _by_name(BUILT_IN_STORAGES))
    metadata: Mapping[str, MetadataEntry] = field(default_factory=lambda: _by_name(BUILT_IN_METADATA))

    @classmethod
    def of(cls, storages: Iterable[StorageEntry], metadata: Iterable[MetadataEntry]) -> Catalog:
        """Returns the catalog of what plugins registered; the built-in entries are not added automatically."""
        return cls(storages=_by_name(storages), metadata=_by_name(metadata))

    @property
    def tables(self) -> frozenset[str]:
        """The metadata backends that read a table, which may hold captions too."""
        return frozenset(self.metadata) - {"discovery"}

    def open_storage(self, spec: DatasetSpec) -> Storage:
        """The storage of a dataset. Raises what its factory raises, such as MissingFileError for a missing folder."""
        entry = self.storages[spec.type]
        return cast("Storage", create(entry, entry.factory, spec))

    def open_source(self, spec: DatasetSpec, storage: Storage) -> MetadataSource:
        """The metadata source of a dataset: names, sizes and captions of its samples."""
        entry = self.metadata[spec.metadata_backend]
        return cast("MetadataSource", create(entry, entry.factory, spec, storage))


def _by_name(entries: Iterable[E]) -> dict[str, E]:
    return {entry.name: entry for entry in entries}


def catalog_of(plugins: Plugins) -> Catalog:
    """The storages and metadata backends of all active plugins."""
    return Catalog.of(plugins.gather(HookSpecs.register_storage), plugins.gather(HookSpecs.register_metadata_backends))
