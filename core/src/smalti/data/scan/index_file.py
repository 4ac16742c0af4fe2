"""The file of an index: Arrow IPC, one row per sample, sorted by key, digests computed while it is written.

The last record batch is empty and has the summary as its metadata, because the digests are known only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray

from smalti.data.datasets.sources import ListedState
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.storage.columns import text_parts
from smalti.system import load_json

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("etag", pa.string()),
        ("size", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("caption_etag", pa.string()),
        ("content", pa.int64()),  # `Header.content`; 0 where no image was opened
        ("place", pa.string()),  # where the source has the bytes; "" for the file `key`
        ("problem", pa.string()),
    ]
)
"""`width` and `height` are 0 in rows that cannot be used; `problem` is then the reason, and "" otherwise."""

BATCH_ROWS = 1 << 17
"""Rows per record batch. At most 2**20, since an Arrow array of strings holds 2 GiB."""
_SUMMARY = b"summary"


@dataclass(frozen=True, kw_only=True)
class IndexDigests:
    """Digests in hexadecimal of all rows in their order: keys; sizes of files and images with contents; captions."""

    keys: str
    content: str
    captions: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an index says of itself: where each record batch begins and the last ends, rows that cannot be used, digests."""

    starts: tuple[int, ...]
    unusable: int
    digests: IndexDigests
    source: ListedState | None = None
    """What the source listed; None if the next scan has to look at each sample."""

    @classmethod
    def read(cls, text: bytes) -> Summary:
        values = load_json(text)
        source = values.get("source")  # None in files of earlier versions
        return cls(
            starts=tuple(values["starts"]),
            unusable=values["unusable"],
            digests=IndexDigests(**values["digests"]),
            source=None if source is None else ListedState(**source | {"notices": tuple(source["notices"])}),
        )


class IndexWriter:
    """Writes an index, in record batches of `BATCH_ROWS` rows however many rows come at once. Close it, or use it in a `with`.

    `recipe` becomes the schema's metadata. `others` are columns beside those of `SCHEMA`: texts and numbers without nulls.
    """

    def __init__(self, sink: BinaryIO | pa.NativeFile, recipe: bytes, others: Iterable[pa.Field] = ()) -> None:
        self._schema = pa.schema([*SCHEMA, *others]).with_metadata({"smalti": recipe})
        self._writer = pa.ipc.new_file(sink, self._schema)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._starts = [0]
        self._unusable = 0
        self._digests = _Digests()
        self.source: ListedState | None = None
        self.lasting_problems = 0
        """How many samples stay unusable until files or table change. Others may be usable in the next scan."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows, which must follow the last ones in order of keys."""
        while len(batch):
            rows = min(len(batch), BATCH_ROWS - self._pending_rows)
            self._pending.append(batch.slice(0, rows))
            self._pending_rows += rows
            batch = batch.slice(rows)
            if self._pending_rows == BATCH_ROWS:
                self._flush()

    def close(self) -> None:
        """Write what remains, and the summary."""
        self._flush()
        source = self.source if self._unusable == self.lasting_problems else None
        summary = Summary(starts=tuple(self._starts), unusable=self._unusable, digests=self._digests.result(), source=source)
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._writer.write_batch(empty, custom_metadata={_SUMMARY: json.dumps(asdict(summary)).encode()})
        self._writer.close()

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        (batch,) = pa.Table.from_batches(self._pending, self._schema).combine_chunks().to_batches()
        self._pending, self._pending_rows = [], 0
        self._writer.write_batch(batch)
        self._starts.append(self._starts[-1] + len(batch))
        self._unusable += int(np.count_nonzero(batch.column("width").to_numpy() == 0))
        self._digests.add(batch)


class IndexFile:
    """An index that was written, mapped into memory. A record batch is opened when it is first read.

    Raises OSError or pa.ArrowInvalid.
    """

    def __init__(self, source: Path | pa.Buffer) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(source)) if isinstance(source, Path) else source)
        self.recipe: bytes = (self._reader.schema.metadata or {}).get(b"smalti", b"")
        count = self._reader.num_record_batches
        metadata = self._reader.get_batch_with_custom_metadata(count - 1)[1] if count else None
        text = metadata.get(_SUMMARY) if metadata is not None else None
        self.summary: Summary | None = None if text is None else Summary.read(text)
        """None in a file of an earlier version."""
        self._batches: list[pa.RecordBatch | None] = [None] * (count - (text is not None))

    def __len__(self) -> int:
        """The number of record batches."""
        return len(self._batches)

    def batch(self, number: int) -> pa.RecordBatch:
        batch = self._batches[number]
        if batch is None:
            batch = self._batches[number] = self._reader.get_batch(number)
        return batch


@dataclass
class _Digests:
    """Computes the digests batch by batch; the result does not depend on where a batch ends."""

    _states: dict[str, Any] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        self._texts("keys", batch.column("key"))
        for name in ("size", "width", "height", "content"):
            self._update(name, batch.column(name).to_numpy())
        for name in batch.schema.names[len(SCHEMA) :]:
            values = batch.column(name)
            if pa.types.is_string(values.type):
                self._texts(f"column {name}", values)
            else:
                self._update(f"column {name}", values.to_numpy())
        captions = batch.column("captions")
        self._update("captions per row", np.diff(captions.offsets.to_numpy()))
        self._texts("captions", captions.flatten())

    def result(self) -> IndexDigests:
        others = sorted(name for name in self._states if name.startswith("column "))
        return IndexDigests(
            keys=self._joined("keys", "keys lengths"),
            content=self._joined("size", "width", "height", "content", *others),
            captions=self._joined("captions per row", "captions", "captions lengths"),
        )

    def _texts(self, name: str, array: pa.Array) -> None:
        text, lengths = text_parts(array)
        self._update(name, text)
        self._update(f"{name} lengths", lengths)

    def _update(self, name: str, data: memoryview | NDArray[Any]) -> None:
        self._states.setdefault(name, blake3()).update(
            data if isinstance(data, memoryview) else np.ascontiguousarray(data).view(np.uint8).data
        )

    def _joined(self, *names: str) -> str:
        return str(blake3(b"".join(self._states.get(name, blake3()).digest() for name in names)).hexdigest())


# --- the recipe: the settings that an index depends on. An index of another recipe is not used --------------------------

_FORMAT = 3  # increase it when a scan finds something else in the same files
_READABLE = (2,)  # earlier formats, whose rows are still right
_LATER_FIELDS = ("caption_extension", "instance_prompt_fallback")
"""Recorded only where they are set, so that the indexes of earlier versions are reused."""


def recipe_of(spec: DatasetSpec) -> bytes:
    """The recipe of the dataset's index in the present format."""
    return _recipe(spec, _FORMAT, spec.columns)


def reusable_recipes(spec: DatasetSpec) -> tuple[bytes, ...]:
    """The recipes of indexes from which unchanged rows are taken over."""
    return tuple(_recipe(spec, number, columns) for number in (_FORMAT, *_READABLE) for columns in (spec.columns, ()))


def _recipe(spec: DatasetSpec, number: int, columns: Iterable[str]) -> bytes:
    fields = {
        "metadata_backend", "json_table", "metadata_options", "caption_strategy",
        "disable_multiline_split", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "max_num_samples",
    }  # fmt: skip
    fields |= {name for name in _LATER_FIELDS if getattr(spec, name) != DatasetSpec.model_fields[name].default}
    places: dict[str, object] = {"caption_weights": True} if spec.caption_weights else {}  # some captions may be missing
    if columns:
        places["columns"] = sorted(columns)  # what they read is compared in each scan
    values = spec.model_dump(mode="json", include=fields)
    if spec.json_table.fallback_caption_column is None:
        del values["json_table"]["fallback_caption_column"]  # as in indexes of earlier versions
    if spec.json_table.identifier_includes_extension:
        del values["json_table"]["identifier_includes_extension"]
    return json.dumps({"format": number} | places | values, sort_keys=True).encode()
