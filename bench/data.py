"""What an index of many images costs: CPU seconds and memory, on synthetic columns.

python bench/data.py index [--rows=1000000]     from columns and from a JSON-lines table, new and unchanged
python bench/data.py open [--rows=100000000]    opening a large index, which is written first (about 60 bytes a row)
python bench/data.py scan [--rows=10000000]     a flat listing: with a JSON-lines table; a tenth of it
                                                with headers that are read, then with changes
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data import catalog_of
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.sources import LISTED, MetadataSource, listed_columns
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import StoredFile
from smalti.plugins import load_plugins

CATALOG = catalog_of(load_plugins())

_BLOCK = 1 << 16


class Listing(LocalStorage):
    """A storage that lists files which are not there, and has no other."""

    def __init__(self, root: Path, rows: int) -> None:
        super().__init__(root)
        self.rows = rows

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        for number in range(self.rows):
            yield StoredFile(key=_key(number), size=200_000 + number % 999, etag=f"{number:x}-17")

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        for batch in Columns(Path(self.location, "input.arrow")).list_columns():
            yield batch.select(["key", "size", "etag"])


class Flat(LocalStorage):
    """Files in one folder that are not there; each begins as a PNG file does. One of `changed` has another etag, 0 for none."""

    def __init__(self, root: Path, rows: int, changed: int = 0) -> None:
        super().__init__(root)
        self.rows, self.changed = rows, changed
        header = b"IHDR" + struct.pack(">IIBBBBB", 1024, 768, 8, 2, 0, 0, 0)
        head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
        self.head = head + struct.pack(">I", 1 << 17) + b"IDAT" + bytes(1 << 14)

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        for start in range(0, self.rows, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, self.rows))
            digits = pa.array(numbers + 10**9).cast(pa.string())
            etags = numbers * 2 + (numbers % self.changed == 0 if self.changed else 0)
            columns = [
                pc.binary_join_element_wise(pc.utf8_slice_codeunits(digits, 1), ".png", ""),
                pa.array(200_000 + numbers % 999),
                pa.array(etags).cast(pa.string()),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=["key", "size", "etag"])

    def read_range(self, key: str, start: int, length: int) -> bytes:
        if not key.endswith(".png"):
            return super().read_range(key, start, length)
        return self.head[start : start + length] if start < len(self.head) else bytes(length)


class Columns(MetadataSource):
    """A source that has read its columns already, as of a parquet table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _key(number: int) -> str:
    return f"part-{number // 10_000:05d}/{number:09d}.jpg"


def _caption(number: int) -> str:
    return f"a photograph of subject {number} in some place, in the evening light, 35mm"


def _columns(start: int, stop: int) -> pa.RecordBatch:
    numbers = range(start, stop)
    columns = {
        "key": pa.array(map(_key, numbers)),
        "size": pa.array(200_000 + np.arange(start, stop) % 999),
        "etag": pa.array([f"{number:x}-17" for number in numbers]),
        "captions": pa.array([[_caption(number)] for number in numbers]),
        "width": pa.array(600 + np.arange(start, stop) % 3000, pa.int32()),
        "height": pa.array(600 + np.arange(start, stop) * 7 % 3000, pa.int32()),
    }
    return listed_columns(pa.RecordBatch.from_pydict(columns))


def _prepare(folder: Path, rows: int) -> None:
    with pa.ipc.new_file(str(folder / "input.arrow"), LISTED) as writer:
        for start in range(0, rows, _BLOCK):
            writer.write_batch(_columns(start, min(start + _BLOCK, rows)))
    with (folder / "metadata.jsonl").open("w") as table:
        for number in range(rows):
            row = {"filename": _key(number), "caption": _caption(number), "width": 600 + number % 3000, "height": 700}
            table.write(f"{json.dumps(row)}\n")


def _build(what: str, folder: Path, rows: int) -> None:
    entry = {"id": "bench", "instance_data_dir": str(folder), "metadata_backend": "json", "caption_strategy": "json"}
    (spec,), _ = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
    storage = Listing(folder, rows)
    source = Columns(folder / "input.arrow") if what == "columns" else CATALOG.open_source(spec, storage)
    build_index(spec, storage, source, folder / f"{what}.arrow")


def _index(folder: Path, rows: int) -> None:
    _prepare(folder, rows)
    for what in ("columns", "columns", "json", "json"):
        state = "unchanged" if (folder / f"{what}.arrow").exists() else "new"
        command = [sys.executable, __file__, "build", what, f"--folder={folder}", f"--rows={rows}"]
        print(f"{what}, {state}:", subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _measured_build(what: str, folder: Path, rows: int) -> None:
    import pyarrow.compute  # noqa: F401 - not part of what is measured

    pa.set_cpu_count(1)
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _build(what, folder, rows)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{time.process_time() - begin:.2f} CPU s, {peak:.0f} MB over the start at most (mapped pages included)")


def _scan(folder: Path, rows: int) -> None:
    with (folder / "metadata.jsonl").open("w") as table:
        for number in range(rows):
            row = f'"filename": "{number:09d}.png", "caption": "photo {number}", "width": {600 + number % 999}, "height": 700'
            table.write(f"{{{row}}}\n")
    cases = (("json", rows, 0), ("discovery", rows // 10, 0), ("discovery", rows // 10, 1000), ("discovery", rows // 10, 0))
    for what, count, changed in cases:
        command = [sys.executable, __file__, "flat", what, f"--folder={folder}", f"--rows={count}", f"--changed={changed}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        print(f"{what}, {count:,} rows, changed: {f'1 of {changed}' if changed else 'all or back'}: {done}", flush=True)


def _measured_scan(what: str, folder: Path, rows: int, changed: int) -> None:
    entry = {"id": "bench", "instance_data_dir": str(folder), "metadata_backend": what}
    entry |= {"caption_strategy": "json" if what == "json" else "filename"}
    (spec,), _ = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
    storage = Flat(folder, rows, changed)
    before = peak = _anonymous_mb()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, _anonymous_mb())

    threading.Thread(target=watch, daemon=True).start()
    begin = time.process_time()
    index = build_index(spec, storage, CATALOG.open_source(spec, storage), folder / f"{what}.arrow")
    spent = time.process_time() - begin
    ended.set()
    size = (folder / f"{what}.arrow").stat().st_size / 2**20
    print(f"{len(index):,} rows: {spent:.1f} CPU s, {peak - before:.0f} MB of anonymous memory at most, index of {size:.0f} MB")


def _anonymous_mb() -> float:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def _open(folder: Path, rows: int) -> None:
    path = folder / "large.arrow"
    with path.open("wb") as file, IndexWriter(file, b"") as writer:
        for start in range(0, rows, 1 << 20):
            writer.write(_small_rows(start, min(start + (1 << 20), rows)))
    times = []
    for _ in range(20):
        begin = time.process_time()
        opened = IndexFile(path)
        assert opened.summary is not None
        index = DatasetIndex("bench", opened, opened.summary)
        times.append(1000 * (time.process_time() - begin))
    last, size = len(index) - 1, path.stat().st_size / 2**30
    print(f"{rows:,} rows, {size:.1f} GiB: opened in {sorted(times)[10]:.2f} ms of CPU; row {last:,} is {index.key(last)}")


def _small_rows(start: int, stop: int) -> pa.RecordBatch:
    count = stop - start
    numbers = np.arange(start, stop)
    digits = np.char.zfill(numbers.astype("U9"), 9)
    empty = pa.array([""]).take(pa.array(np.zeros(count, dtype=np.int64)))
    columns = dict.fromkeys(("etag", "caption_etag", "place", "problem"), empty)
    columns |= {name: pa.array(numbers % 999 + 600, SCHEMA.field(name).type) for name in ("size", "width", "height", "content")}
    columns["captions"] = pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, dtype=np.int32)), pa.array([], pa.string()))
    columns["key"] = pa.array(digits)
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("index", "open", "scan", "build", "flat"))
    parser.add_argument("what", nargs="?", default="columns")
    parser.add_argument("--rows", type=lambda text: int(float(text)))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--changed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "build":
        _measured_build(arguments.what, arguments.folder, arguments.rows)
        return
    if arguments.command == "flat":
        _measured_scan(arguments.what, arguments.folder, arguments.rows, arguments.changed)
        return
    run, rows = {"index": (_index, 10**6), "open": (_open, 10**8), "scan": (_scan, 10**7)}[arguments.command]
    with tempfile.TemporaryDirectory() as name:
        run(Path(name), arguments.rows or rows)


if __name__ == "__main__":
    main()
