"""The names of files in a listing, with and without an extension, and the extension of an image's format."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from smalti.data import EXTENSIONS

_STARTS = (
    (b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"GIF8", ".gif"), (b"BM", ".bmp"),
    (b"II*\0", ".tif"), (b"MM\0*", ".tif"), (b"II+\0", ".tif"), (b"MM\0+", ".tif"),
)  # fmt: skip


def with_extension(batch: pa.RecordBatch, extensions: Iterable[str] = EXTENSIONS) -> pa.RecordBatch:
    """The files whose names end in one of the extensions, in any case."""
    names = "|".join(sorted(extension.removeprefix(".") for extension in extensions))
    return batch.filter(pc.match_substring_regex(batch.column("key"), rf"[^/]\.({names})$", ignore_case=True))


def extension_of(image: bytes | memoryview) -> str:
    """The extension of an image by its first bytes; "" for a format that is not known."""
    start = bytes(image[:12])
    if start[4:8] == b"ftyp":
        return ".avif"
    if start[8:] == b"WEBP":
        return ".webp"
    return next((extension for known, extension in _STARTS if start.startswith(known)), "")
