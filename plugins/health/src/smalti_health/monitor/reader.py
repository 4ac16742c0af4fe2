"""What the monitor needs of a driver, and threads that keep a driver that hangs away from the monitor."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

from smalti_health.monitor.requests import DeviceRequest
from smalti_health.policy.readings import Device, Reading


class Absent(Exception):  # noqa: N818 - it is no error to have no driver
    """There is no such driver, or not this part of it; the message says why."""


class GpuReader(ABC):
    """One GPU, in a thread of its own, which calls `describe` once and then `read` at each interval.

    Both put `begin(NAME)` and `end()` around each call to the driver, so that the monitor can name one that does not return.
    What a GPU does not report is None in the result. An exception becomes a reading that has failed, and the next one is tried.
    """

    def __init__(self) -> None:
        self._running: tuple[str, float] | None = None

    @abstractmethod
    def describe(self) -> Device:
        """What does not change."""

    @abstractmethod
    def read(self) -> Reading:
        """The present values, with the UUID of the GPU and the time. Has `failed` for calls that returned an error."""

    def begin(self, call: str) -> None:
        """A call to the driver begins."""
        self._running = (call, time.monotonic())

    def end(self) -> None:
        """The call has returned."""
        self._running = None

    def unanswered(self) -> tuple[str, float]:
        """The call that is being made, and since how many seconds; ("", 0.0) for none. Called from another thread."""
        running = self._running
        return ("", 0.0) if running is None else (running[0], time.monotonic() - running[1])


class Driver(Protocol):
    """The driver of a vendor, whose name for people is `vendor`. The constructor raises Absent if there is none, or no GPU.

    The monitor and `smalti health` create it in a thread, and may leave it there: a driver may hang. UUIDs are any texts that
    differ between the GPUs of a machine and stay the same.
    """

    vendor: str

    def find(self, request: DeviceRequest) -> str | None:
        """The UUID of the GPU of a rank; None if the driver does not know it."""
        ...

    def all(self) -> list[str]:
        """The UUIDs of all GPUs, in the driver's order."""
        ...

    def gpu(self, uuid: str) -> GpuReader:
        """The reader of one GPU. Called in the thread that reads it."""
        ...

    def watch(self, uuid: str) -> Any:
        """What `wait` takes to wait for faults of a GPU, in a thread of its own. Raises Absent if there are no such events."""
        ...

    def wait(self, events: Any, seconds: float) -> int | None:
        """The number of the next fault, in NVIDIA's numbers of XIDs; None if none came within these seconds."""
        ...


class Poller:
    """Reads one GPU in a thread of its own, when asked to."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self.uuid = uuid
        self.device = Device(uuid=uuid)
        self.described = False
        self._driver = driver
        self._gpu: GpuReader | None = None
        self._asked, self._done = threading.Event(), threading.Event()
        self._done.set()
        self._asked_at = 0.0
        self._reading: Reading | None = None
        self._failure = ""
        threading.Thread(target=self._run, name=f"smalti-{uuid[:12]}", daemon=True).start()

    def ask(self) -> bool:
        """Begin a reading. False if the last one has not ended."""
        if not self._done.is_set():
            return False
        self._done.clear()
        self._asked_at = time.monotonic()
        self._asked.set()
        return True

    def reading(self, seconds: float, timeout: float) -> Reading | None:
        """The reading that was asked for, after at most `seconds`; later None, or one that names the unanswered call.

        A call is unanswered after `timeout` seconds.
        """
        if self._done.wait(max(0.0, seconds)):
            return self._reading or Reading(uuid=self.uuid, time=time.time(), failed=(self._failure,))
        waited = time.monotonic() - self._asked_at
        if waited < timeout:
            return None
        call, _ = self._gpu.unanswered() if self._gpu is not None else ("", 0.0)
        seconds = round(waited, 1)
        return Reading(uuid=self.uuid, time=time.time(), unanswered=call or "its first call", unanswered_seconds=seconds)

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                if self._gpu is None:
                    self._gpu = self._driver.gpu(self.uuid)
                if not self.described:
                    self.device, self.described = self._gpu.describe(), True
                self._reading, self._failure = self._gpu.read(), ""
            except Exception as error:  # noqa: BLE001 - whatever a driver's package raises, the monitor goes on
                self._reading, self._failure = None, f"{type(error).__name__}: {error}"
            self._done.set()
