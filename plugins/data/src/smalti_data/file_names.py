"""The names of files in a listing: those with an extension, and names without one."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from smalti.data import EXTENSIONS


def with_extension(batch: pa.RecordBatch, extensions: Iterable[str] = EXTENSIONS) -> pa.RecordBatch:
    """The files whose names end in one of the extensions, in any case."""
    names = "|".join(sorted(extension.removeprefix(".") for extension in extensions))
    return batch.filter(pc.match_substring_regex(batch.column("key"), rf"[^/]\.({names})$", ignore_case=True))


def stems(keys: pa.Array) -> pa.Array:
    """Keys without their extension, but with the dot before it: then they sort as the keys do, where no name has other dots."""
    return pc.replace_substring_regex(keys, r"[^./]*$", "")
