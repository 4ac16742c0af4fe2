"""A scan by all ranks: all of them list ranges of keys and open files, the main rank writes the indexes.

The main rank hands out ranges, and parts of what was listed, two at a time to each rank. Meanwhile the ranks exchange short
messages, so no collective call waits for a scan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache
from pathlib import Path

from smalti.config import Config
from smalti.data.datasets.sources import MetadataSource
from smalti.data.datasets.spec import DatasetSpec, catalog_of
from smalti.data.from_options import Scan, dataset_specs, scan_data
from smalti.data.scan.build import scan_part
from smalti.data.scan.ranges.listing import list_range
from smalti.data.scan.tasks import AT_ONCE, Handed, Task
from smalti.data.storage.protocol import Storage
from smalti.data.threads import Threads
from smalti.parallel import Communicator, run_on_all_ranks
from smalti.plugins import Plugins

_SHORTEST_ROUND = 0.02
_LONGEST_ROUND = 0.25
"""Seconds. Rounds become longer as long as nothing happens."""


def scan_data_on_all_ranks(
    config: Config,
    plugins: Plugins,
    alignment: int,
    directory: Path,
    communicator: Communicator,
    progress: Scan,
    *,
    attempt: float | None = None,
) -> tuple[str, ...]:
    """Like `scan_data`, by all ranks together; returns the notices, on the main rank. *Collective*. Raises RankError."""
    catalog = catalog_of(plugins)
    notices: list[str] = []

    @cache
    def opened(dataset: str) -> tuple[DatasetSpec, Storage, MetadataSource]:
        spec = next(spec for spec in dataset_specs(config, catalog) if spec.id == dataset)
        storage = catalog.open_storage(spec)
        return spec, storage, catalog.open_source(spec, storage)

    def scan(handed: Handed) -> None:
        data = scan_data(
            config,
            plugins,
            alignment,
            directory,
            progress,
            attempt=attempt,
            handed=handed if communicator.world.size > 1 else None,
        )
        notices.extend(data.notices)

    def work(task: Task) -> None:
        spec, storage, source = opened(task.dataset)
        if not task.listed:
            list_range(storage, task)
            return
        scan_part(spec, storage, source, directory / f"{spec.file_name}.arrow", task)

    scan_on_all_ranks(communicator, scan, work)
    return tuple(notices)


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
            answers = [json.loads(answer) for answer in run_on_all_ranks(communicator, exchange)]
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
