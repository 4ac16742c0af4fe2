"""Threads that read from storages, and that do not delay the end of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """A pool of threads, to use in a `with` statement. If that ends with an exception, the threads are abandoned.

    A read from a storage that does not answer cannot be interrupted, and Python waits for the threads of `concurrent.futures`
    even at the end of the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._abandoned = False
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(count)]

    def submit(self, function: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()

        def work() -> None:
            try:
                future.set_result(function(item))
            except BaseException as error:  # noqa: BLE001 - raised where the result is requested
                future.set_exception(error)

        self._work.put(work)
        return future

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Returns the results in order; all of the work is queued at once."""
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def __enter__(self) -> Threads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._abandoned = error is not None
        for _ in self._threads:
            self._work.put(None)
        for thread in () if self._abandoned else self._threads:
            thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None and not self._abandoned:
            work()
