"""All GPUs of this machine, read once."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass

from smalti import UserError
from smalti_health.monitor.drivers import open_driver
from smalti_health.monitor.reader import Absent, Driver, Poller
from smalti_health.policy.decisions import Action, Decision
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import Policy
from smalti_health.policy.readings import Device, Reading, payload

_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class GpuNow:
    """A GPU; `decisions` is what the policy says about this one reading."""

    device: Device
    reading: Reading
    decisions: tuple[Decision, ...]

    @property
    def stops(self) -> bool:
        return any(each.action > Action.WARN for each in self.decisions)

    def row(self) -> tuple[str, ...]:
        reading = self.reading
        cells = [
            "" if value is None else f"{value}{unit}"
            for value, unit in (
                (reading.temperature, ""),
                (reading.memory_used_percent, "%"),
                (reading.ecc_uncorrected, ""),
            )
        ]
        worst = max((each.action for each in self.decisions), default=Action.IGNORE)
        messages = "; ".join(each.message for each in self.decisions)
        return (str(self.device.index), self.device.name, *cells, worst.name.lower() if worst else "ok", messages)

    def described(self) -> dict[str, object]:
        decisions = [{**asdict(each), "action": each.action.name.lower()} for each in self.decisions]
        reading = {key: value for key, value in asdict(self.reading).items() if value not in (None, (), "")}
        return {**payload(self.device, self.reading), "reading": reading, "decisions": decisions}


def read_now(limits: Limits) -> list[GpuNow]:
    """Raises UserError if there is no driver, or it does not answer."""
    opened: list[Driver | str] = []
    uuids: list[str] = []

    def run() -> None:
        try:
            driver = open_driver()
            uuids.extend(driver.all())
            opened.append(driver)
        except Absent as absent:
            opened.append(str(absent))
        except Exception as error:  # noqa: BLE001 - whatever a driver's package raises
            opened.append(f"{type(error).__name__}: {error}")

    opening = threading.Thread(target=run, daemon=True)
    opening.start()
    opening.join(_SECONDS)
    fix = "without a driver of GPUs there is nothing to watch; see docs/health.md"
    if not opened:
        raise UserError(f"the driver has not answered for {_SECONDS:.0f} s", fix="restart the machine")
    if isinstance(opened[0], str):
        raise UserError(f"no GPU can be read: {opened[0]}", fix=fix)
    return _read(opened[0], uuids, limits)


def _read(driver: Driver, uuids: list[str], limits: Limits) -> list[GpuNow]:
    pollers = [Poller(driver, uuid) for uuid in uuids]
    until = time.monotonic() + _SECONDS
    for poller in pollers:
        poller.ask()
    found = []
    for poller in pollers:
        reading = poller.reading(until - time.monotonic(), 0.0)
        if reading is not None:
            decisions = Policy((poller.device,), limits).observe(reading)
            found.append(GpuNow(device=poller.device, reading=reading, decisions=tuple(decisions)))
    return found
