"""Registers storages and metadata backends for other data than folders, a scan by all ranks, and `smalti dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CommandCollector, MetadataEntry, ScanEntry, StorageEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup

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
STORAGES = (
    StorageEntry(
        name="huggingface",
        title="A dataset of the Hugging Face Hub",
        factory="smalti_data.archives.hub:open_hub",
        keys=HUB_KEYS,
    ),
    StorageEntry(name="csv", title="Images of a list of URLs", factory="smalti_data.urls.url_list:open_folder", keys=LIST_KEYS),
)
METADATA = (
    MetadataEntry(name="json", title="A JSON-lines table", factory="smalti_data.json_table:open_json"),
    MetadataEntry(name="csv", title="A CSV table", factory="smalti_data.urls.url_list:open_csv"),
    MetadataEntry(
        name="parquet",
        title="Parquet tables, or parquet files of images",
        factory="smalti_data.tables.parquet_table:open_parquet",
    ),
    MetadataEntry(name="webdataset", title="Tar shards", factory="smalti_data.archives.webdataset:WebDataset"),
    MetadataEntry(name="huggingface", title="Images in parquet files", factory="smalti_data.archives.hub:HubImages"),
)

SCAN = ScanEntry(
    name="all-ranks",
    title="by all ranks together",
    wanted="smalti_data.all_ranks.wanted:ranks_scan",
    scan="smalti_data.all_ranks.scan:scan_datasets",
)


class Data:
    """Active where it is installed; a source is imported when a dataset uses it."""

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        return list(STORAGES)

    @hookimpl
    def register_metadata_backends(self) -> list[MetadataEntry]:
        return list(METADATA)

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_data.options import GROUP

        return [GROUP]

    @hookimpl
    def configure_scan(self, config: Config) -> ScanEntry | None:
        from smalti.config import LaunchOptions
        from smalti_data.options import ScanOptions

        if config[LaunchOptions].num_processes == 1 or config[ScanOptions].data_scan == "launcher":
            return None
        return SCAN

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Scan datasets and check them against the batch size."
        commands.add_deferred("smalti_data.dataset:dataset", summary, section="Data")
        keys = "Print all keys of a dataset entry as Markdown."
        commands.below("dataset").add_deferred("smalti_data.dataset_keys:reference", keys)
        commands.below("dataset").add_deferred(
            "smalti_data.commands:unpack", "Write the images of parquet files into a folder, with their captions."
        )


plugin = Data()
