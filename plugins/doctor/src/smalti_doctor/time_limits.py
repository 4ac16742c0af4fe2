"""Run functions at the same time, each with a time limit, because file systems, name servers and drivers hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def run_within(tasks: Mapping[str, tuple[Callable[[], T], float]]) -> dict[str, T | Exception]:
    """The result of each task, or its exception, by name. Each has a limit in seconds; after it, TimeoutError.

    The thread of such a task remains until it returns, and does not keep the process from ending.
    """
    found: dict[str, T | Exception] = {}

    def run(name: str, task: Callable[[], T]) -> None:
        try:
            found[name] = task()
        except Exception as error:  # noqa: BLE001 - the caller reports it, whatever it is, beside the other results
            found[name] = error

    begun = time.monotonic()
    threads = {name: threading.Thread(target=run, args=(name, task), daemon=True) for name, (task, _) in tasks.items()}
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, begun + tasks[name][1] - time.monotonic()))
    late = {name: TimeoutError(f"did not return within {limit:g} s") for name, (_, limit) in tasks.items()}
    return {name: found.get(name, late[name]) for name in tasks}
