"""Registers the storage `aws` for datasets, and `smalti s3`."""

from __future__ import annotations

from smalti import StorageEntry, hookimpl
from smalti_storage_s3.client.settings import KEYS


class StorageS3:
    """Active where it is installed; nothing is imported or sent before a dataset names the storage."""

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        return [
            StorageEntry(
                name="aws", title="S3, and stores like it", factory="smalti_storage_s3.client.storage:open_dataset", keys=KEYS
            )
        ]


plugin = StorageS3()
