"""The queue: launches that wait until devices are free. Its files are in the user's data folder, so it outlives the server.

The queue advances while a server runs. Several servers of the same user share it; one that holds the lock starts the next
launch.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from smalti import UserError
from smalti.rundir import RunDirectory, find_runs
from smalti.system import Process, atomic_write, read_regular
from smalti_webui.launch.devices import VISIBLE, Devices, local_devices
from smalti_webui.launch.launches import Launch, Request, Store, as_json, from_json
from smalti_webui.server.processes import start_detached
from smalti_webui.server.settings import Settings

SECONDS = 2.0
"""Between two looks at the devices, while something waits."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A request in the queue. `file` orders it."""

    request: Request
    file: Path


class Queue:
    """What waits, in order; `paused` if nothing is to be started."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(settings)
        self.folder = settings.data / "queue"
        self._paused = self.folder / "paused"

    # --- what waits ---------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The requests in their order. A file that cannot be read is left where it is, and left out."""
        found = []
        for file in sorted(self.folder.glob("*.json")):
            try:
                found.append(Entry(request=from_json(read_regular(file)), file=file))
            except (ValueError, OSError) as error:
                _log.warning("ignoring %s: %s", file, error)
        return found

    def add(self, request: Request) -> None:
        """Append a request."""
        with self._locked():
            last = max((_number(entry.file) for entry in self.entries()), default=0)
            atomic_write(self.folder / f"{last + 1:08d}-{request.id}.json", as_json(request))

    def remove(self, identity: str) -> Request:
        """Take a request out. Raises UserError if it no longer waits."""
        with self._locked():
            entry = self._entry(identity)
            entry.file.unlink()
        return entry.request

    def move_up(self, identity: str) -> None:
        """Exchange a request with the one before it. Raises UserError if it no longer waits."""
        with self._locked():
            entries, entry = self.entries(), self._entry(identity)
            place = [each.request.id for each in entries].index(identity)
            if place > 0:
                before = entries[place - 1]
                first, second = _number(before.file), _number(entry.file)
                before.file.rename(self.folder / f"{second:08d}-{before.request.id}.json")
                entry.file.rename(self.folder / f"{first:08d}-{identity}.json")

    @property
    def paused(self) -> bool:
        return self._paused.exists()

    def pause(self, *, paused: bool) -> None:
        """Stop or allow starting what waits. Runs are not affected."""
        with self._locked():
            if paused:
                self._paused.touch()
            else:
                self._paused.unlink(missing_ok=True)

    def _entry(self, identity: str) -> Entry:
        for entry in self.entries():
            if entry.request.id == identity:
                return entry
        raise UserError("this launch no longer waits", fix="it was started or removed: see the list of launches")

    # --- starting -----------------------------------------------------------------------------------------------------

    def reason(self, request: Request, devices: Devices) -> str:
        """What a request waits for; empty if it can start now. `devices` are those of this moment."""
        if (used := self._user_of(request.output_dir)) is not None:
            return f"waits for {used} to end, which uses the same run directory"
        for needed in (request.folder, request.config):
            if not needed.exists():
                return f"cannot start: {needed} does not exist any more"
        active = self.store.active()
        if request.gpus == 0 or not devices.gpus:
            running = self._running_here(active)
            return f"waits for the processors of this node: {running} is running" if running else ""
        if devices.error:
            return f"waits for the GPUs of this node: {devices.error}"
        if request.gpus > len(devices.gpus):
            return f"needs {request.gpus} GPUs, but this node has {len(devices.gpus)}"
        free = devices.free(_reserved(active))
        if len(free) >= request.gpus:
            return ""
        return f"waits for {request.gpus} GPUs: {len(free)} of {len(devices.gpus)} {'is' if len(free) == 1 else 'are'} free"

    def start(self, request: Request, devices: Devices) -> Launch:
        """Start a request on free devices, whether it had to wait or not. Raises UserError for a directory in use."""
        if (used := self._user_of(request.output_dir)) is not None:
            raise UserError(f"{request.output_dir} is in use by {used}", fix="stop that run, or choose another output_dir")
        chosen = devices.gpus[: request.gpus]
        variables = {}
        if 0 < request.gpus < len(devices.gpus):
            free = devices.free(_reserved(self.store.active()))
            chosen = free[: request.gpus] if len(free) >= request.gpus else chosen
            variables = {VISIBLE: ",".join(map(str, chosen))}
        begun = time.time()
        pid = start_detached(request.command, self.store.log(request.id), request.folder, variables)
        launch = Launch(request=request, process=Process.of(pid), started=begun, devices=chosen)
        self.store.write(launch)
        return launch

    def advance(self) -> Launch | None:
        """Start the first request if nothing keeps it waiting; None otherwise. Later ones do not overtake it."""
        with self._locked():
            entries = self.entries()
            if not entries or self.paused:
                return None
            if self.store.was_started(entries[0].request.id):  # and the server ended before it could say so
                entries[0].file.unlink()
                return None
            devices = local_devices()
            if self.reason(entries[0].request, devices):
                return None
            launch = self.start(entries[0].request, devices)
            entries[0].file.unlink()
            return launch

    def _user_of(self, directory: Path | None) -> str | None:
        """The run or launch that uses a run directory now."""
        if directory is None:
            return None
        place = directory.resolve()
        for launch in self.store.active():
            if launch.request.output_dir is not None and launch.request.output_dir.resolve() == place:
                return launch.request.name
        return directory.name if _is_running(RunDirectory(directory)) else None

    def _running_here(self, active: Sequence[Launch]) -> str:
        """A run on this node: started by this page, or found below its folders."""
        if active:
            return active[0].request.name
        for root in self.settings.roots:
            for run in find_runs(root):
                if _is_running(run):
                    return run.path.name
        return ""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the queue, which ends with the process."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


async def keep_advancing(queue: Queue) -> None:
    """Start what waits, as devices become free, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(queue.advance)
        except (UserError, OSError) as error:
            _log.error("the queue cannot start its next launch: %s", error)
        await asyncio.sleep(SECONDS)


def _is_running(run: RunDirectory) -> bool:
    with suppress(UserError, OSError):
        heartbeat = run.heartbeat()
        return heartbeat is not None and heartbeat.alive() is True
    return False


def _reserved(active: Sequence[Launch]) -> frozenset[int]:
    """The GPUs of launches that may not have reached them yet."""
    return frozenset(gpu for launch in active for gpu in launch.devices)


def _number(file: Path) -> int:
    digits = file.name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
