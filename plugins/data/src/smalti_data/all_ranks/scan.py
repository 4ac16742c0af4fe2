"""A scan by all ranks: all of them list ranges of keys and open files, the main rank writes the indexes.

The main rank hands out ranges, and parts of what was listed, two at a time to each rank. Meanwhile the ranks exchange short
messages, so no collective call waits for a scan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pyarrow as pa

from smalti.config import Config
from smalti.data import (
    Catalog,
    Dataset,
    DatasetSpec,
    MetadataSource,
    PreparedData,
    Progress,
    Storage,
    Threads,
    build_datasets,
    catalog_of,
    dataset_specs,
    reading_threads,
    write_rows,
)
from smalti.parallel import Communicator, run_on_all_ranks
from smalti.plugins import Plugins
from smalti.system import load_json
from smalti_data.all_ranks.listing import list_range
from smalti_data.all_ranks.shared import SharedCatalog, shared_rows
from smalti_data.all_ranks.tasks import AT_ONCE, Handed, Task, wait_for

_SHORTEST_ROUND = 0.02
_LONGEST_ROUND = 0.25
"""Seconds. Rounds become longer as long as nothing happens."""


def scan_datasets(
    config: Config, plugins: Plugins, directory: Path, communicator: Communicator, scan: Callable[..., PreparedData]
) -> tuple[str, ...]:
    """Scan the datasets of a run, see `smalti.ScanEntry`. *Collective*. Raises RankError."""
    notices: list[str] = []
    opened = cache(partial(open_dataset, config, plugins))

    def scan_here(handed: Handed) -> None:
        notices.extend(scan(build=partial(build_shared, handed)).notices)

    def work(task: Task) -> None:
        work_on(task, *opened(task.dataset), directory)

    scan_on_all_ranks(communicator, scan_here, work)
    return tuple(notices)


def open_dataset(config: Config, plugins: Plugins, dataset: str) -> tuple[DatasetSpec, Storage, MetadataSource]:
    """What tasks of a dataset need, beside the folder of its index."""
    catalog = catalog_of(plugins)
    spec = next(spec for spec in dataset_specs(config, catalog) if spec.id == dataset)
    storage = catalog.open_storage(spec)
    return spec, storage, catalog.open_source(spec, storage)


def build_shared(
    handed: Handed,
    specs: Sequence[DatasetSpec],
    catalog: Catalog,
    directory: Path,
    progress: Callable[[str], Progress] | None,
    *,
    kind: Literal["image", "eval"] = "image",
) -> tuple[Dataset, ...]:
    """`smalti.data.build_datasets`, with what it hands out to other ranks."""
    shared = SharedCatalog(
        storages=catalog.storages, metadata=catalog.metadata, columns=catalog.columns, directory=directory, handed=handed
    )
    return build_datasets(specs, shared, directory, progress, kind=kind, make_rows=partial(shared_rows, handed))


def work_on(task: Task, spec: DatasetSpec, storage: Storage, source: MetadataSource, directory: Path) -> None:
    """Do a task, whose indexes are in `directory`."""
    if not task.listed:
        list_range(storage, task)
        return
    wait_for(Path(task.listed))
    (part,) = pa.ipc.open_file(task.listed).read_all().combine_chunks().to_batches()
    from smalti.data import EarlierRows, Rows  # which need pyarrow.compute

    earlier = EarlierRows.open(spec, [directory / f"{spec.file_name}.arrow"])
    rows = Rows(spec=spec, storage=storage, source=source, earlier=earlier)
    with reading_threads() as pool:
        made, _ = rows.of(part, pool)
    write_rows(Path(task.rows), spec, made)


def scan_on_all_ranks(communicator: Communicator, scan: Callable[[Handed], None], work: Callable[[Task], None]) -> None:
    """Run `scan` on the main rank, and `work` for each of its tasks on some rank, until the scan ends. *Collective*.

    Raises `RankError` on all ranks if one of them fails.
    """
    world = communicator.world
    handed = Handed(world.size)
    mine: dict[str, Future[None]] = {}
    given: dict[int, set[str]] = {rank: set() for rank in range(world.size)}
    interval = _SHORTEST_ROUND

    def assigned() -> dict[str, list[dict[str, object]]]:
        found: dict[str, list[dict[str, object]]] = {}
        for _ in range(AT_ONCE):
            for rank, tasks in given.items():
                if len(tasks) < AT_ONCE and (task := handed.next()) is not None:
                    tasks.add(task.rows)
                    found.setdefault(str(rank), []).append(asdict(task))
        return found

    with Threads(1, "smalti-scan-all") as scanning, Threads(1, "smalti-scan-part") as working:
        main = scanning.submit(scan, handed) if world.is_main else None

        def exchange() -> str:
            _wait(main, list(mine.values()), interval)
            done = [rows for rows, future in mine.items() if future.done()]
            for rows in done:
                mine.pop(rows).result()
            if main is not None and main.done():
                main.result()
                return json.dumps({"ended": True, "tasks": {}, "done": done})
            return json.dumps({"ended": False, "tasks": assigned() if main is not None else {}, "done": done})

        while True:
            answers = [load_json(answer) for answer in run_on_all_ranks(communicator, exchange)]
            for rank, answer in enumerate(answers):
                for rows in answer["done"] if world.is_main else ():
                    given[rank].discard(rows)
                    handed.done(rows)
            if answers[0]["ended"]:
                return
            happened = answers[0]["tasks"] or any(answer["done"] for answer in answers)
            interval = _SHORTEST_ROUND if happened else min(2 * interval, _LONGEST_ROUND)
            for values in answers[0]["tasks"].get(str(world.rank), ()):
                mine[values["rows"]] = working.submit(work, Task(**values))


def _wait(main: Future[None] | None, mine: list[Future[None]], seconds: float) -> None:
    """Until there is something to say, or for some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(future.done() for future in (*mine, *([main] if main else []))):
        time.sleep(0.01)
