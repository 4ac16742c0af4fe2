"""The files of a storage sorted by kind, as columns: images with the etags of their text files, and what is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.datasets.sources import CAPTION_EXTENSIONS, DESCRIPTIONS
from smalti.data.scan.image_sizes import EXTENSIONS
from smalti.data.sources.unchanged import ListedOnce, ListingDigest, joined, visible
from smalti.data.storage.protocol import Storage

_NAME_END = r"[^./]*$"  # a name from its last dot on, without the dot


class ImageFiles:
    """The images of a storage, sorted by key. Hidden files and folders (".name") are skipped.

    `batches` yields columns `key`, `size`, `etag` and `caption_etag`: the etag of the text file with the same stem and the
    extension `caption_extension`, "" without one. `skipped` counts other files by extension in lower case, but for those that
    describe data (`DESCRIPTIONS`), and those whose names end with one of `others`. `digest` is that of all of these files.
    """

    def __init__(self, storage: Storage | ListedOnce, caption_extension: str = ".txt", *, others: Iterable[str] = ()) -> None:
        self._storage = storage
        self._others = others
        self._caption_extension = caption_extension
        self.skipped: dict[str, int] = {}
        self.digest = ListingDigest()

    def batches(self) -> Iterator[pa.RecordBatch]:
        self.skipped = {}
        self.digest = ListingDigest()
        carried: pa.RecordBatch | None = None
        for window in visible(self._storage.list_columns()):
            known = self._known(window)
            if carried is not None and len(carried):
                known = joined([carried, known])
            if not len(window) or not len(known):
                continue
            # An image and its text share the stem, but other names may sort between them: those are waited for.
            last = window.column("key")[len(window) - 1].as_py()
            ends = pc.binary_join_element_wise(pc.binary_slice(stems(known.column("key")).cast(pa.binary()), 0, -1), b"/", b"")
            open_rows = np.flatnonzero(pc.greater(ends, last.encode()).to_numpy(zero_copy_only=False))
            complete = int(open_rows[0]) if len(open_rows) else len(known)
            yield from self._images(known.slice(0, complete))
            carried = known.slice(complete)
        if carried is not None:
            yield from self._images(carried)

    def _known(self, window: pa.RecordBatch) -> pa.RecordBatch:
        """The images and text files among these files; the others are counted."""
        self.digest.add(window)
        for ending in self._others:
            window = window.filter(pc.invert(pc.ends_with(window.column("key"), ending)))
        keys = window.column("key")
        known = pc.or_(has_extension(keys, EXTENSIONS), has_extension(keys, (self._caption_extension,)))
        others = keys.filter(pc.invert(known))
        for key in others.to_pylist():
            extension = key[key.rfind(".") :].lower() if "." in key.rpartition("/")[2] else ""
            if extension not in DESCRIPTIONS and extension not in CAPTION_EXTENSIONS:
                self.skipped[extension] = self.skipped.get(extension, 0) + 1
        return window.filter(known) if len(others) else window

    def _images(self, files: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        is_image = has_extension(files.column("key"), EXTENSIONS)
        images, texts = files.filter(is_image), files.filter(pc.invert(is_image))
        if not len(images):
            return
        wanted = pc.binary_join_element_wise(stems(images.column("key")), self._caption_extension[1:], "")
        found = pc.index_in(wanted, value_set=texts.column("key"))
        etags = pc.fill_null(texts.column("etag").take(found), "")
        yield images.append_column("caption_etag", etags)


def stems(keys: pa.Array) -> pa.Array:
    """Keys without their extension, but with the dot before it: then they sort as the keys do, where no name has other dots."""
    return pc.replace_substring_regex(keys, _NAME_END, "")


def has_extension(keys: pa.Array, extensions: Iterable[str]) -> pa.Array:
    """Which keys end with one of these extensions, in any case."""
    names = "|".join(sorted(extension.removeprefix(".") for extension in extensions))
    return pc.match_substring_regex(keys, rf"\.(?:{names})$", ignore_case=True)
