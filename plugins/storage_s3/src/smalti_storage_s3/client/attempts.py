"""Repeats requests that may succeed later, and counts them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from smalti.data import Traffic
from smalti_storage_s3.client.errors import Fault, Kind, error_of

T = TypeVar("T")
_log = logging.getLogger(__name__)
_REPORT_SECONDS = 60.0
_FEW = 6  # a digest that differs this often, or an answer that is none of S3, is no accident of the network


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a request is repeated, in seconds.

    `deadline` limits one operation, `first_deadline` the time until a store has answered for the first time: an address that
    is wrong should be reported soon. The pause before the n-th repetition is random, up to `pause` * 2^n and `longest_pause`.
    After `silent` seconds without success the failures are logged, and then once a minute.
    """

    deadline: float = 300.0
    first_deadline: float = 30.0
    pause: float = 0.1
    longest_pause: float = 20.0
    silent: float = 5.0
    connect_timeout: float = 5.0
    read_timeout: float = 30.0


class Counter:
    """The traffic by operation, from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_operation: dict[str, Traffic] = {}

    def add(self, operation: str, *, requests: int = 0, sent: int = 0, received: int = 0, retries: int = 0) -> None:
        with self._lock:
            old = self._by_operation.get(operation, Traffic())
            self._by_operation[operation] = replace(
                old,
                requests=old.requests + requests,
                sent=old.sent + sent,
                received=old.received + received,
                retries=old.retries + retries,
            )

    def snapshot(self) -> dict[str, Traffic]:
        with self._lock:
            return dict(self._by_operation)


class Attempts:
    """Runs requests of one storage until they succeed, fail for good, or their time is over."""

    def __init__(self, timeouts: Timeouts, counter: Counter) -> None:
        self._timeouts = timeouts
        self._counter = counter
        self._answered = False
        self._next_report = 0.0

    def run(self, operation: str, place: str, request: Callable[[], T], *, sent: int = 0) -> T:
        """Returns what `request` returns. Raises the StorageError of its last Fault.

        `request` may keep what it has received so far between its calls. Faults of the kinds EXISTS and RANGE, which are
        answers, are raised as they are.
        """
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            self._counter.add(operation, requests=1, sent=sent, retries=tries > 1)
            try:
                result = request()
            except Fault as fault:
                self._answered |= fault.status > 0
                if fault.kind in (Kind.EXISTS, Kind.RANGE):
                    raise
                seconds = time.monotonic() - began
                again = fault.kind is Kind.TRANSIENT
                again = again or (fault.kind in (Kind.DAMAGED, Kind.STRANGE) and tries < _FEW)
                deadline = self._timeouts.deadline if self._answered else self._timeouts.first_deadline
                pause = max(fault.after, self._pause(tries))
                error = error_of(fault, place, operation, tries=tries, seconds=seconds)
                if not again or seconds + pause > deadline:
                    raise error from None
                if seconds + pause > self._timeouts.silent:
                    self._report(f"{error.message}; it is tried again for up to {deadline:.0f} s")
                time.sleep(pause)
            else:
                self._answered = True
                return result

    def _report(self, text: str) -> None:
        """Log a failure, unless one was logged a short time ago, also by another thread."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            _log.warning("%s", text)

    def _pause(self, tries: int) -> float:
        longest = min(self._timeouts.longest_pause, self._timeouts.pause * 2.0 ** min(tries - 1, 30))
        return random.uniform(0.0, longest)
