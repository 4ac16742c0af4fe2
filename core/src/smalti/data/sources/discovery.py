"""The images of a folder as a metadata source. What imports pyarrow.compute is imported by a scan: ranks have no use for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from smalti.data.datasets.sources import ListedState, MetadataSource, listed_columns
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.storage.protocol import Storage

if TYPE_CHECKING:
    from smalti.data.sources.unchanged import ListedOnce


class Discovery(MetadataSource):
    """Every image below the dataset's root, by file extension. Hidden files and folders (".name") are skipped."""

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self._listing: Storage | ListedOnce = storage

    def is_unchanged(self, before: ListedState) -> bool:
        from smalti.data.sources.unchanged import ListedOnce

        listing = ListedOnce(self._storage)
        if not listing.is_same(before.digest, self._spec.id):
            self._listing = listing
            return False
        self.skipped_files = before.skipped_files
        return True

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        from smalti.data.sources.image_files import ImageFiles

        files = ImageFiles(self._listing, self._spec.caption_extension, others=self._spec.column_endings)
        for images in files.batches():
            yield listed_columns(images)
        self.skipped_files = files.skipped
        self.listed_state = ListedState(digest=files.digest.result(self._spec.id), skipped_files=files.skipped)
