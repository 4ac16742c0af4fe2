"""A storage whose files are listed by all ranks: ranges of keys as files in the run directory, read in their order.

The first `FIRST_ROWS` files are listed as one chain, so a small dataset costs what it costs one rank. What comes after them is
split into ranges (`split_keys`), or by keys of the last index where there is one. A rank lists at most `CHUNK_ROWS` files of
a range at a time; the rest of it is another task, which is split again where too few are left for all ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from smalti.data import Storage, StoredFile, written
from smalti.system import load_json, remove_tree
from smalti_data.all_ranks.bounds import split_keys
from smalti_data.all_ranks.tasks import Handed, Task, wait_for

FIRST_ROWS = 1 << 16
CHUNK_ROWS = 1 << 17
Range = tuple[str, "str | None"]
"""Keys after the first text, up to and with the second; None: to the end."""


class ListedByRanks(Storage):
    """A storage whose `list_columns` all ranks work for. The rest of it is that of `storage`.

    `folder` is for the files of the ranges, which are removed when they were read. `known` are keys that divide the files into
    about equal ranges, if a former listing is known.
    """

    def __init__(self, storage: Storage, dataset: str, handed: Handed, folder: Path, known: Sequence[str] = ()) -> None:
        self._storage = storage
        self._dataset = dataset
        self._handed = handed
        self._folder = folder
        self._known = known

    @property
    def location(self) -> str:
        return self._storage.location

    def stat(self, key: str) -> StoredFile:
        return self._storage.stat(key)

    def read(self, key: str) -> bytes:
        return self._storage.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._storage.read_range(key, start, length)

    def write(self, key: str, data: bytes) -> None:
        self._storage.write(key, data)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        return self._storage.list(prefix, after=after)

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        if prefix:
            yield from self._storage.list_columns(prefix, after=after)
            return
        if self._folder.exists():
            remove_tree(self._folder)
        self._folder.mkdir(parents=True)
        ends = [key for key in self._known if key > after]
        ranges: list[Range] = list(zip([after, *ends], [*ends, None], strict=True))
        listing = _Listing(self._dataset, self._handed, self._folder)
        listing.add(ranges, CHUNK_ROWS if ends else FIRST_ROWS)
        yield from listing.batches()
        remove_tree(self._folder)


@dataclass(eq=False)
class _Chunk:
    """A task; once it is done, `rest` are the chunks of what it left of its range."""

    path: Path
    done: Future[Path]
    rest: list[_Chunk] = field(default_factory=list)


class _Listing:
    """One listing: its chunks in order of their keys. The scan reads them; what a rank left is handed out when it is done."""

    def __init__(self, dataset: str, handed: Handed, folder: Path) -> None:
        self._dataset, self._handed, self._folder = dataset, handed, folder
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._numbers = iter(range(10**9))
        self._open = 0

    def add(self, ranges: Sequence[Range], rows: int) -> None:
        """Hand out the first tasks."""
        self._chunks = self._submitted(ranges, rows)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The files of all ranges, in order."""
        waiting = self._chunks[::-1]
        while waiting:
            chunk = waiting.pop()
            chunk.done.result()
            with self._lock:
                waiting.extend(chunk.rest[::-1])
            with pa.memory_map(str(chunk.path)) as file:
                reader = pa.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
            chunk.path.unlink()

    def _submitted(self, ranges: Sequence[Range], rows: int) -> list[_Chunk]:
        return [self._submit(after, until, rows) for after, until in ranges]

    def _submit(self, after: str, until: str | None, rows: int) -> _Chunk:
        self._open += 1
        enough = self._open >= 2 * self._handed.ranks
        path = self._folder / f"{next(self._numbers):09}.arrow"
        task = Task(
            dataset=self._dataset,
            rows=str(path),
            after=after,
            until=until,
            most=rows,
            pieces=1 if enough else 2 * self._handed.ranks,
        )
        chunk = _Chunk(path=path, done=Future())
        self._handed.submit(task).add_done_callback(lambda done: self._finish(chunk, done))
        return chunk

    def _finish(self, chunk: _Chunk, done: Future[Path]) -> None:
        """Called by the thread that notes what ranks have done."""
        try:
            wait_for(chunk.path)
            with pa.OSFile(str(chunk.path)) as file:
                rest: list[Range] = load_json(pa.ipc.open_file(file).schema.metadata[b"rest"])
            with self._lock:
                self._open -= 1
                chunk.rest = self._submitted(rest, CHUNK_ROWS)
        except BaseException as error:  # noqa: BLE001 - raised where the listing is read
            chunk.done.set_exception(error)
        else:
            chunk.done.set_result(done.result())


def list_range(storage: Storage, task: Task) -> None:
    """List the files of a range, `task.most` of them at most, into `task.rows`, with the ranges that are left of it."""
    batches: list[pa.RecordBatch] = []
    count, more = 0, False
    for batch in storage.list_columns(after=task.after):
        inside = batch if task.until is None else batch.slice(0, _count_up_to(batch.column("key"), task.until))
        batches.append(inside.slice(0, task.most - count))
        count += len(batches[-1])
        if len(inside) < len(batch) or count == task.most:
            more = count == task.most
            break
    rest: list[Range] = []
    if more:
        last = str(batches[-1].column("key")[-1].as_py())

        def next_key(after: str) -> str | None:
            found = next(iter(storage.list(after=after)), None)
            return None if found is None else found.key

        following = next_key(last)
        if following is not None and (task.until is None or following <= task.until):
            bounds = split_keys(next_key, last, task.until, task.pieces)
            rest = list(zip([last, *bounds], [*bounds, task.until], strict=True))
    schema = pa.schema([("key", pa.string()), ("size", pa.int64()), ("etag", pa.string())], {"rest": json.dumps(rest)})
    with written(Path(task.rows)) as file:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def _count_up_to(keys: pa.Array, until: str) -> int:
    """How many of these keys, which ascend, are not after `until`."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if keys[middle].as_py() <= until else (low, middle)
    return low
