"""The monitor as a rank sees it: a thread that waits for messages, and on the first rank of a node the process itself.

Nothing here is done on the training thread but to start and to end.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import cast

from smalti import GpuFault
from smalti.system import FOLDER_VARIABLE, PARENT_VARIABLE
from smalti_health.monitor.channel import Channel
from smalti_health.monitor.process import Setup
from smalti_health.monitor.requests import DeviceRequest

_REGISTER_SECONDS = 0.5
_REPEAT_SECONDS = 30.0
"""A rank asks again this often, because a monitor that was started again knows no ranks."""
_POLL_SECONDS = 2.0
"""How often the first rank looks after the process."""
_RESTARTS = 3
_END_SECONDS = 3.0
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER_VARIABLE)
_log = logging.getLogger(__name__)


class Watch:
    """`report` is called in a thread with each fault. `starts` is for the first rank of a node."""

    def __init__(
        self, setup: Setup, request: DeviceRequest, device: str, report: Callable[[GpuFault], None], *, starts: bool
    ) -> None:
        self._setup, self._request, self._device, self._report = setup, request, device, report
        self._starts = starts
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smalti-health", daemon=True)

    def start(self) -> None:
        """Start the thread, and the process. Never waits for either."""
        try:
            self._channel = Channel(self._setup.address(f"rank-{self._request.rank}"))
            if self._starts:
                self._start_process()
        except OSError as error:
            _log.warning("the health of GPUs is not watched: %s", error)
            return
        self._thread.start()

    def stop(self) -> None:
        """End the process, which takes milliseconds unless its driver hangs."""
        self._over.set()
        if self._channel is not None:
            self._channel.wake()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    def _start_process(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        environment[PARENT_VARIABLE] = str(os.getpid())
        self._started += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smalti_health.monitor.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(self._setup.line())
            self._process.stdin.flush()

    def _run(self) -> None:
        channel = cast(Channel, self._channel)
        watched, asked = False, float("-inf")
        while not self._over.is_set():
            if self._has_died() and self._restarted():
                watched, asked = False, float("-inf")
            if time.monotonic() - asked >= (_REPEAT_SECONDS if watched else _REGISTER_SECONDS):
                asked = time.monotonic()
                channel.send(self._setup.address("monitor"), asdict(self._request))
            message = channel.receive(_POLL_SECONDS if watched else _REGISTER_SECONDS)
            if message is None:
                continue
            state = message.get("state")
            if state == "watching":
                watched = True
            elif state == "absent":
                _log.info("the health of %s is not watched: %s", self._device, message.get("reason"))
                break
            elif state == "warning":
                self._report(self._warning(f"{message.get('reason')}"))
            elif state == "decision":
                self._report(self._fault(message))
        channel.close()

    def _has_died(self) -> bool:
        return self._process is not None and self._process.poll() is not None and not self._over.is_set()

    def _restarted(self) -> bool:
        """Start the process again, a few times."""
        process, self._process = cast("subprocess.Popen[bytes]", self._process), None
        status = process.returncode
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        if self._started > _RESTARTS:
            self._report(self._warning(f"the monitor ended {self._started} times; the GPUs are not watched any more"))
            return False
        self._report(self._warning(f"the monitor ended with status {status} and is started again"))
        try:
            self._start_process()
        except OSError as error:
            self._report(self._warning(f"the monitor cannot be started: {error}"))
        return True

    def _warning(self, message: str) -> GpuFault:
        return GpuFault(kind="monitor", message=message, device=self._device, rank=self._request.rank, severity="warning")

    def _fault(self, message: Mapping[str, object]) -> GpuFault:
        reading = message.get("reading")
        return GpuFault(
            kind=str(message["kind"]),
            message=str(message["message"]),
            device=self._device,
            rank=self._request.rank,
            severity="critical" if message["critical"] else "warning",
            memory=bool(message["memory"]),
            reading={**(reading if isinstance(reading, dict) else {}), "decision": message["action"]},
        )
