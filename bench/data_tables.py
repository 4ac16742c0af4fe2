"""A parquet table of captions and sizes to a ready index: CPU seconds and peak memory, against a loop over rows.

python bench/data_tables.py [--rows=1000000]

The loop joins a dictionary of the listing with the rows, as `to_dict` of pandas (where it is installed) or `to_pylist` of
pyarrow gives them, and sorts; it writes no index. Each way runs in a process of its own, on one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.data import DatasetSpec
from smalti.data.scan.build import build_index
from smalti.data.storage.local import LocalStorage
from smalti_data.tables.parquet_table import open_parquet

_GROUP = 100_000


class Listing(LocalStorage):
    """A storage that lists the files of a mapped Arrow file, and has no other."""

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        reader = pa.ipc.open_file(pa.memory_map(f"{self.location}/listing.arrow"))
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def make(folder: Path, rows: int) -> None:
    """Write the table, which is not sorted, and the listing. Of each thousand, one row has no file and one file has no row."""
    order = np.random.default_rng(0).permutation(rows)
    writer = None
    for start in range(0, rows, _GROUP):
        some = order[start : start + _GROUP]
        numbers = some.tolist()
        columns = {
            "filename": [key(number) for number in numbers],
            "caption": [
                f"a photograph of subject {n} in some place, in the evening light" if n % 50 else None for n in numbers
            ],
            "alt": [f"alt {number} " + "x" * 60 for number in numbers],
            "width": 600 + some % 3000,
            "height": 600 + some * 7 % 3000,
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(folder / "table.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    numbers = [number for number in range(rows + rows // 1000) if number % 1000 != 7 or number >= rows]
    table = pa.table({"key": [key(n) for n in numbers], "size": numbers, "etag": [f"{n:x}-{n + 1:x}" for n in numbers]})
    with pa.OSFile(str(folder / "listing.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table, max_chunksize=1 << 16)


def key(number: int) -> str:
    return f"part-{number // 10000:05d}/{number:09d}.jpg"


def ours(folder: Path) -> int:
    options = {"path": str(folder / "table.parquet")}
    spec = DatasetSpec(
        id="bench",
        instance_data_dir=folder,
        metadata_backend="parquet",
        caption_strategy="parquet",
        metadata_options=options,
    )
    storage = Listing(folder)
    return len(build_index(spec, storage, open_parquet(spec, storage), folder / "index.arrow"))


def loop(folder: Path) -> int:
    """Rows as dictionaries."""
    files = {row["key"]: (row["size"], row["etag"]) for batch in Listing(folder).list_columns() for row in batch.to_pylist()}
    if find_spec("pandas") is not None:
        import pandas  # type: ignore[import-untyped,unused-ignore]

        rows = pandas.read_parquet(folder / "table.parquet").to_dict("records")
    else:
        rows = pq.read_table(folder / "table.parquet").to_pylist()
    found = [
        (row["filename"], *files[row["filename"]], row["width"], row["height"], row["caption"])
        for row in rows
        if row["filename"] in files
    ]
    found.sort(key=lambda row: row[0])
    return len(found)


def peak() -> int:
    """KiB of this process so far. Other than `getrusage`, not those of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(way: str, folder: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--way", way, str(folder)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--way", nargs=2)
    arguments = parser.parse_args()
    if arguments.way:
        pa.set_cpu_count(1)
        way, folder = arguments.way
        before, start = peak(), time.process_time()
        rows = {"ours": ours, "loop": loop}[way](Path(folder))
        seconds = time.process_time() - start
        print(json.dumps({"rows": rows, "cpu_s": round(seconds, 2), "peak_mb": round((peak() - before) / 1024)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.rows)
        found = {way: measured(way, Path(folder)) for way in ("ours", "loop")}
    print(json.dumps(found | {"ratio": round(found["ours"]["cpu_s"] / found["loop"]["cpu_s"], 3)}))


if __name__ == "__main__":
    main()
