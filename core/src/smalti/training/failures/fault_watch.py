"""Faults that were reported from beside the loop (`RunState.report_fault`), where the loop does not take them.

The loop takes them at each step boundary, and the ranks agree there on what follows. Before the loop there is no boundary: this
thread calls the hooks, and a stop ends the run while its data are scanned or encoded. In the loop, a rank whose device hangs
reaches no boundary: after a grace period the thread ends the rank, and the other ranks treat it as lost, and save.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

from smalti.errors import ExitCode, GpuFaultError
from smalti.parallel import FailureDetector
from smalti.plugins import Plugins
from smalti.system import describe, signal_handler, write_exit_report
from smalti.training.failures.emergency_save import emergency_save
from smalti.training.failures.faults import decide, request
from smalti.training.failures.watchdog import Watch, leave
from smalti.training.run import Run
from smalti.types import FaultAction, RankInfo, RunState

GRACE_SECONDS = 5.0
"""What a fault waits for a step boundary beyond the time of two steps, and before the loop for the main thread to react."""
_FIRST_STEP_SECONDS = 60.0
"""The same while the time of steps is unknown."""
_EVERY_SECONDS = 0.25
_INTERRUPT = cast(signal.Signals, signal.SIGRTMIN + 2 if hasattr(signal, "SIGRTMIN") else signal.SIGIO)
"""Sent to the main thread alone; no scheduler sends it. macOS has no real-time signals."""


class FaultWatch(Watch):
    """Around all that a rank does with its device. Set `info` too once it exists."""

    name = "smalti-faults"

    def __init__(self, plugins: Plugins, state: RunState, detector: FailureDetector) -> None:
        super().__init__(detector)
        self.info: RankInfo | None = None
        self._raised: GpuFaultError | None = None
        self._plugins = plugins
        self._state = state

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Around what comes before the loop: a fault after which the run stops is raised there as a GpuFaultError."""

        def interrupt(number: int, frame: object) -> None:
            if self._raised is not None:
                raise self._raised

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signal_handler((_INTERRUPT,), interrupt):
            yield
            if self._raised is not None:
                raise self._raised

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            if not self._state.has_faults or (self.run is not None and self._taken_by_loop(self.run)):
                continue
            faults = self._state.take_faults()
            action = max(decide(self._plugins, self._state, fault, self.info) for fault in faults)
            message = "; ".join(f"{fault.kind} on {fault.device}: {fault.message}" for fault in faults)
            request(self._state, action, message)  # which also tells whether other ranks mark what they save as suspect
            if action < FaultAction.STOP_SAVED:
                continue
            if self.run is None:
                self._raised = GpuFaultError(f"{message}; there is nothing to save yet")
                signal.pthread_kill(self._watched, _INTERRUPT)
                if self._over.wait(GRACE_SECONDS):
                    return
            self._leave(GpuFaultError(f"{message}; this rank does not reach the end of its step"))

    def _taken_by_loop(self, run: Run) -> bool:
        """Whether the loop takes the faults within the time of the running step."""
        seconds = run.step_times.p95
        grace = GRACE_SECONDS + (_FIRST_STEP_SECONDS if seconds is None else 2 * seconds)
        begun = time.monotonic()
        while self._state.has_faults and time.monotonic() - begun < grace:
            if self._over.wait(_EVERY_SECONDS):
                return True
        return not self._state.has_faults

    def _leave(self, error: GpuFaultError) -> NoReturn:
        """In place of the main thread, which stays where it is."""

        def save() -> GpuFaultError:
            write_exit_report(ExitCode.GPU_FAULT, describe(error))
            print(f"smalti: {error}", file=sys.stderr)
            if self.run is None:
                self._apart.diagnose(error)
            else:
                emergency_save(self.run, error, self._apart, aside=True)
            return error

        leave(error, ExitCode.GPU_FAULT, self.run, save)
