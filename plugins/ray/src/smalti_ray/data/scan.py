"""A scan by the workers of a Ray cluster: they list ranges of keys and open files, this process writes the indexes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import ray

from smalti import Config
from smalti.data import Threads
from smalti.parallel import Communicator
from smalti.plugins import Plugins
from smalti.system import preemption_as_exception
from smalti_data.all_ranks.scan import build_shared
from smalti_data.all_ranks.tasks import Handed, Task
from smalti_ray.cluster import connected
from smalti_ray.data.job import workers_for
from smalti_ray.data.options import EngineOptions

_MOST_WORKERS = 64
"""For which tasks are kept ready where nothing bounds the workers."""


def scan_datasets(
    config: Config, plugins: Plugins, directory: Path, communicator: Communicator, scan: Callable[..., Any]
) -> tuple[str, ...]:
    """Scan the datasets of a configuration, see `smalti.ScanEntry`, in one process. Raises UserError."""
    with connected(config[EngineOptions].address), preemption_as_exception():
        return tuple(scan_on_cluster(config, plugins, directory, scan).notices)


def scan_on_cluster(config: Config, plugins: Plugins, directory: Path, scan: Callable[..., Any]) -> Any:
    """The same within a connection; returns what `scan` does."""
    options = config[EngineOptions]
    room = int(ray.cluster_resources().get("CPU", 0) / options.engine_cpus)  # type: ignore[no-untyped-call]
    handed = Handed(max(1, min(options.engine_workers or _MOST_WORKERS, room)))
    with workers_for("scan", config, plugins, directory) as workers, Threads(1, "smalti-scan-all") as scanning:
        main = scanning.submit(lambda build: scan(build=build), partial(build_shared, handed))
        workers.run(_ScanTasks(handed, main))
        return main.result()


class _ScanTasks:
    """Those that the scan, which runs in a thread of its own, hands out. It shows its progress itself."""

    def __init__(self, handed: Handed, main: Future[Any]) -> None:
        self._handed = handed
        self._main = main
        self._waiting = deque[Task]()

    def waiting(self) -> int:
        while (task := self._handed.next()) is not None:
            self._waiting.append(task)
        return len(self._waiting)

    def next(self) -> Task:
        return self._waiting.popleft()

    def lost(self, task: Task) -> None:
        self._waiting.appendleft(task)

    def done(self, task: Task, result: object) -> None:
        self._handed.done(task.rows)

    def ended(self) -> bool:
        return self._main.done()

    def show(self, doing: int) -> None:
        pass
