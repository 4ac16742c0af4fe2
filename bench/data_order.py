"""The order of samples at 10^8 images: what a rank needs to open it, and for a batch at a random position.

python bench/data_order.py [--rows=100000000] [--batch=1024]

The index is synthetic, only sizes, made here and removed afterwards (1.2 GB of disk); images have the sizes of real
photographs, in 60 buckets or so. CPU milliseconds of this process, with the pages in memory.

- rows: making the rows by bucket, once per index and node.
- open: index, rows and order, as each rank does; batch: 1,024 samples at random positions of 50 epochs, and in sequence.
- heap: growth of the private memory of the process by all that, mapped files not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from smalti.data.batch_check import BatchShape
from smalti.data.dataset import Dataset
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.prepared import DataRules, PreparedData, prepare
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import SCHEMA, IndexDigests, IndexFile, Summary
from smalti.data.sources.discovery import Discovery
from smalti.data.storage.local import LocalStorage

CHUNK = 1 << 17


def write_index(path: Path, rows: int) -> None:
    """An index of sizes alone, 8 bytes a row, as nothing else is read for the order."""
    random = np.random.default_rng(1)
    schema = pa.schema([SCHEMA.field("width"), SCHEMA.field("height")])
    starts = (*range(0, rows, CHUNK), rows)
    summary = Summary(starts=starts, unusable=0, digests=IndexDigests(keys="", content=str(rows), captions=""))
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start, stop in pairwise(starts):
            widths = random.integers(80, 512, stop - start) * 8
            heights = np.clip(widths * np.exp(random.normal(0, 0.35, stop - start)) // 8 * 8, 640, 6000)
            writer.write_batch(pa.record_batch([pa.array(one.astype(np.int32)) for one in (widths, heights)], schema=schema))
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        writer.write_batch(empty, custom_metadata={b"summary": json.dumps(asdict(summary)).encode()})


def open_index(path: Path) -> DatasetIndex:
    file = IndexFile(path)
    assert file.summary is not None
    return DatasetIndex("photos", file, file.summary)


def open_data(folder: Path, batch: int) -> PreparedData:
    """What a rank does: open the index and the rows by bucket, decide about small buckets, describe the data."""
    spec = DatasetSpec(id="photos", instance_data_dir=folder, resolution=1024)
    storage = LocalStorage(folder)
    index = open_index(folder / "photos.arrow")
    dataset = Dataset(spec=spec, storage=storage, source=Discovery(spec, storage), index=index)
    rules = DataRules(seed=42, shape=BatchShape(train_batch_size=batch, ranks=1, accumulation=1))
    data = prepare([dataset], rules, directory=folder)
    assert data.identity.version
    return data


def private_mb() -> float:
    with Path("/proc/self/smaps_rollup").open() as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["Anonymous"].split()[0]) / 1024


def cpu_ms(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return 1000 * (time.process_time() - begin)


def measure(folder: Path, rows: int, batch: int) -> dict[str, float]:
    write_index(folder / "photos.arrow", rows)
    result: dict[str, float] = {"rows": rows, "batch": batch}
    result["rows: CPU s"] = cpu_ms(lambda: open_data(folder, batch)) / 1000
    path_bytes = sum(one.stat().st_size for one in folder.iterdir())
    result["disk: MB"] = path_bytes / 2**20
    before = private_mb()
    result["open: CPU ms"] = min(cpu_ms(lambda: open_data(folder, batch)) for _ in range(5))
    order = open_data(folder, batch).order
    result["open: heap MB"] = private_mb() - before
    epoch = order.epoch_start(1)
    positions = np.random.default_rng(2).integers(0, 50 * epoch, 300).tolist()
    for position in positions:
        order.batch(position)  # the pages of the mapped rows
    times = [cpu_ms(partial(order.batch, position)) for position in positions]
    result |= {"buckets": len(order.buckets), "version": order.version, "batches per epoch": epoch}
    result |= {
        f"random batch: CPU ms, {name}": float(np.quantile(times, share)) for name, share in (("median", 0.5), ("p99", 0.99))
    }
    result["sequence: CPU ms"] = cpu_ms(lambda: [order.batch(3 * epoch + place) for place in range(500)]) / 500
    result["heap MB"] = private_mb() - before
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--batch", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), int(arguments.rows), arguments.batch), indent=1))


if __name__ == "__main__":
    main()
