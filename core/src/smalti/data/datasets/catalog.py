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

HUB_KEYS = (
    "dataset_name", "split", "revision", "dataset_config", "image_column", "caption_column", "fallback_caption_column",
    "streaming", "num_proc", "auto_load", "file_extension", "width_column", "height_column",
)  # fmt: skip
"""The keys of an entry of the Hub; they may be in its `huggingface` block too."""
LIST_KEYS = (
    "csv_file", "csv_cache_dir", "csv_url_column", "csv_caption_column", "csv_digest_column", "csv_downloads", "csv_timeout",
    "csv_max_megabytes", "csv_allow_private_addresses",
)  # fmt: skip
"""The keys of an entry of a list of URLs."""
BUILT_IN_STORAGES = (
    StorageEntry(name="local", title="A folder", factory="smalti.data.storage.local:open_local"),
    StorageEntry(
        name="huggingface",
        title="A dataset of the Hugging Face Hub",
        factory="smalti.data.sources.archives.hub:open_hub",
        keys=HUB_KEYS,
    ),
    StorageEntry(
        name="csv",
        title="Images of a list of URLs",
        factory="smalti.data.sources.urls.url_list:open_folder",
        keys=LIST_KEYS,
    ),
)
BUILT_IN_METADATA = (
    MetadataEntry(name="discovery", title="The images themselves", factory="smalti.data.datasets.sources:Discovery"),
    MetadataEntry(name="json", title="A JSON-lines table", factory="smalti.data.sources.json_table:open_json"),
    MetadataEntry(name="csv", title="A CSV table", factory="smalti.data.sources.urls.url_list:open_csv"),
    MetadataEntry(name="webdataset", title="Tar shards", factory="smalti.data.sources.archives.webdataset:WebDataset"),
    MetadataEntry(name="huggingface", title="Images in parquet files", factory="smalti.data.sources.archives.hub:HubImages"),
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
