"""The monitor of a node. It reads the GPUs that ranks ask for, and sends each rank what was decided about its GPU.

It fails open: whatever goes wrong here is a warning to the ranks. It ends with its parent, or when its input is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from smalti.system import die_with_parent, load_json
from smalti_health.monitor.channel import Channel, address
from smalti_health.monitor.drivers import open_driver
from smalti_health.monitor.reader import Absent, Driver, Poller
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.monitor.trace_file import TraceFile
from smalti_health.policy.decisions import Action, Decision
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import Policy
from smalti_health.policy.readings import Device, Reading, payload

_EVENT_SECONDS = 30.0
_WAIT_SECONDS = 1.0
"""How long a round waits for the drivers; a reading that takes longer is of a later round."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a monitor is started with, as JSON in its first line of input. `first` is the rank that
    started it, `port` the ranks', `metrics_port` Prometheus'.
    """

    run: str
    node: int
    first: int
    port: str
    directory: str
    interval: float
    timeout: float
    metrics_port: int
    limits: Limits

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: str) -> Setup:
        values = load_json(line)
        return cls(**{**values, "limits": Limits(**values["limits"])})

    def address(self, end: str) -> bytes:
        return address(self.run, self.node, self.port, end)


class Monitor:
    """One round reads all GPUs once. GPUs are added when a rank asks for them."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self._setup = setup
        self._channel = channel
        self._driver: Driver | None = None
        self._absent = ""
        self._opening = threading.Thread(target=self._open, name="smalti-driver", daemon=True)
        self._opened_at = time.monotonic()
        self._ranks: dict[int, str] = {}
        self._finding: dict[int, float] = {}
        self._pollers: dict[str, Poller] = {}
        self._policy = Policy((), setup.limits)
        self._xids: defaultdict[str, deque[int]] = defaultdict(deque)
        self._wake, self._woken = os.pipe()
        self._said: set[str] = set()
        self._trace = TraceFile(Path(setup.directory), setup.node, self._warn)
        self.latest: dict[str, tuple[Device, Reading]] = {}
        if setup.metrics_port:
            from smalti_health.monitor.metrics import serve

            try:
                serve(setup.metrics_port, self.latest)
            except (OSError, ImportError) as error:
                self._warn(f"readings are not served on port {setup.metrics_port}: {error}")

    def run(self) -> None:
        """Until the input ends."""
        self._opening.start()
        due, inputs = time.monotonic(), [0, self._channel.fileno(), self._wake]
        while True:
            ready, _, _ = select.select(inputs, [], [], max(0.0, due - time.monotonic()))
            if 0 in ready and not os.read(0, 4096):
                return
            if self._channel.fileno() in ready:
                self._answer()
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._round()
            elif time.monotonic() >= due:
                due = time.monotonic() + self._setup.interval
                self._round()

    def _open(self) -> None:
        try:
            self._driver = open_driver()
        except Absent as absent:
            self._absent = str(absent)
        except Exception as error:  # noqa: BLE001 - whatever a driver's package raises
            self._absent = f"{type(error).__name__}: {error}"
        os.write(self._woken, b".")

    def _answer(self) -> None:
        """A rank asks for its GPU, and is answered at once or after the driver was opened."""
        message = self._channel.receive(0.0)
        if message is None:
            return
        try:
            request = DeviceRequest(**message)  # type: ignore[arg-type]
        except TypeError:
            return
        if request.rank in self._ranks:
            self._reply(request.rank, state="watching", uuid=self._ranks[request.rank])
        elif self._absent:
            self._reply(request.rank, state="absent", reason=self._absent)
        elif (since := self._finding.get(request.rank)) is not None:
            if time.monotonic() - since > self._setup.timeout:
                self._warn(f"the driver does not find the GPU of rank {request.rank}: it is not watched")
        elif self._driver is not None:
            self._finding[request.rank] = time.monotonic()
            threading.Thread(target=self._find, args=(self._driver, request), name="smalti-find", daemon=True).start()
        elif time.monotonic() - self._opened_at > self._setup.timeout:
            self._warn("the driver does not answer: its GPUs are not watched")

    def _find(self, driver: Driver, request: DeviceRequest) -> None:
        try:
            uuid = driver.find(request)
        except Exception as error:  # noqa: BLE001 - whatever a driver's package raises
            self._reply(request.rank, state="absent", reason=f"{type(error).__name__}: {error}")
            return
        if uuid is None:
            self._reply(request.rank, state="absent", reason=f"{driver.vendor} does not know the GPU {request.names()}")
            return
        if uuid not in self._pollers:
            self._pollers[uuid] = Poller(driver, uuid)
            threading.Thread(target=self._events, args=(driver, uuid), name="smalti-xid", daemon=True).start()
        self._ranks[request.rank] = uuid
        self._reply(request.rank, state="watching", uuid=uuid)
        os.write(self._woken, b".")

    def _events(self, driver: Driver, uuid: str) -> None:
        """Wait for XIDs, for as long as the driver has them."""
        with suppress(Absent):
            events = driver.watch(uuid)
            while True:
                if (xid := driver.wait(events, _EVENT_SECONDS)) is not None:
                    self._xids[uuid].append(xid)
                    os.write(self._woken, b".")

    def _round(self) -> None:
        pollers = list(self._pollers.values())
        until = time.monotonic() + _WAIT_SECONDS
        asked = [poller.ask() for poller in pollers]
        found: list[tuple[Device, Reading]] = []
        for poller, is_asked in zip(pollers, asked, strict=True):
            seconds = until - time.monotonic() if is_asked else 0.0  # one that hangs is not waited for again
            reading = poller.reading(seconds, self._setup.timeout)
            reading = self._with_xids(poller.uuid, reading)
            if reading is not None:
                found.append((poller.device, reading))
                self._policy.add(poller.device)
        for device, reading in found:
            self.latest[device.uuid] = (device, reading)
            for decision in self._policy.observe(reading):
                self._decided(decision, device, reading)
        if found:
            self._trace.append([poller.device for poller in pollers], [reading for _, reading in found])

    def _with_xids(self, uuid: str, reading: Reading | None) -> Reading | None:
        """XIDs are reported even while the driver answers nothing else."""
        waiting, xids = self._xids[uuid], []
        while waiting:
            xids.append(waiting.popleft())
        if not xids:
            return reading
        return replace(reading or Reading(uuid=uuid, time=time.time()), xids=tuple(xids))

    def _decided(self, decision: Decision, device: Device, reading: Reading) -> None:
        for rank, uuid in self._ranks.items():
            if uuid == decision.uuid:
                self._send_decision(rank, decision, payload(device, reading))

    def _warn(self, message: str) -> None:
        """To all ranks, once."""
        if message in self._said:
            return
        self._said.add(message)
        self._channel.send(self._setup.address(f"rank-{self._setup.first}"), {"state": "warning", "reason": message})

    def _send_decision(self, rank: int, decision: Decision, reading: Mapping[str, object]) -> None:
        self._reply(
            rank,
            state="decision",
            kind=decision.kind,
            action=decision.action.name.lower(),
            critical=decision.action > Action.WARN,
            memory=decision.memory,
            message=decision.message,
            reading=dict(reading),
        )

    def _reply(self, rank: int, **message: object) -> None:
        self._channel.send(self._setup.address(f"rank-{rank}"), message)


def main() -> None:
    """Read the setup and watch. Whatever fails ends the process with a sentence that the first rank repeats."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    line = sys.stdin.readline()
    if not line:
        return
    setup = Setup.parse(line)
    Monitor(setup, Channel(setup.address("monitor"))).run()
    os._exit(0)  # threads may be in calls that do not return


if __name__ == "__main__":
    main()
