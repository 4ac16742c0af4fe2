"""Datasets in folders on a local or mounted disk, with captions in files or names."""

from __future__ import annotations

from smalti.data import BUILT_IN_METADATA, BUILT_IN_STORAGES
from smalti.hookspecs import hookimpl
from smalti.types import MetadataEntry, StorageEntry


class Folders:
    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        return list(BUILT_IN_STORAGES)

    @hookimpl
    def register_metadata_backends(self) -> list[MetadataEntry]:
        return list(BUILT_IN_METADATA)


plugin = Folders()
