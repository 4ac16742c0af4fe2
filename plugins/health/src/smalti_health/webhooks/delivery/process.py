"""The sender as a rank sees it: a pipe into which hooks write, without ever waiting.

The pipe is the queue. What does not fit, because the sender is stopped or slow, waits in a bounded list for the next call;
of that list, events that are not critical go first.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import IO

from smalti.system import FOLDER_VARIABLE, load_json, note_progress
from smalti_health.webhooks.delivery.outbox import Event
from smalti_health.webhooks.delivery.sender import Setup

PIPE_BYTES = 1 << 20
LONGEST_LIST = 256
STARTS = 3
RESENT = 16
"""How many critical events are sent once more to a sender that was started again. It knows those that are in the outbox."""
_GRACE_SECONDS = 2.0
_EXIT_SECONDS = 0.5
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER_VARIABLE)
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Line:
    """An event on its way to the sender."""

    data: bytes
    critical: bool


@dataclass(frozen=True)
class Pipes:
    """The standard input and output of the sender."""

    stdin: IO[bytes]
    stdout: IO[bytes]


class SenderProcess:
    """The sender of one rank. `send` may be called from any thread.

    One that has died is started again, at most `STARTS` times. Its critical events are in the outbox, or are sent once more.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._list: deque[Line] = deque()
        self._critical: deque[Line] = deque(maxlen=RESENT)
        self._rest = b""
        self._printed = b""
        self._starts = 0
        self.dropped = 0

    def start(self) -> None:
        """Start the process, which takes this one some milliseconds."""
        with self._lock:
            self._start()
            self._flush()

    def send(self, event: Event) -> None:
        """Hand over an event: one write to a pipe, that does not block. Starts the sender if it does not run."""
        line = Line(data=json.dumps(asdict(event), default=str).encode() + b"\n", critical=event.critical)
        with self._lock:
            if len(self._list) >= LONGEST_LIST:
                self._list.remove(next((each for each in self._list if not each.critical), self._list[0]))
                self.dropped += 1
            self._list.append(line)
            self._flush()

    def reports(self) -> list[str]:
        """What the sender has reported since the last call. Does not block."""
        with self._lock:
            return self._read()[0]

    def finish(self) -> dict[str, int]:
        """Tell the sender that the run ends, and wait until it has sent everything, for a limited time.

        Returns the numbers of events that were delivered, failed, dropped, and still wait; nothing if the sender did not say.
        """
        with self._lock:
            until = time.monotonic() + self._setup.end_seconds + _GRACE_SECONDS
            self._list.append(Line(data=b"{}\n", critical=True))
            while (self._list or self._rest) and self._process is not None and time.monotonic() < until:
                self._flush()
                if self._process is not None and (self._list or self._rest):
                    select.select([], [self._pipes.stdin], [], _POLL_SECONDS)
                note_progress()
            counts: dict[str, int] = {}
            if self._process is None:
                return counts
            with suppress(OSError):
                self._pipes.stdin.close()
            while not counts and time.monotonic() < until:
                select.select([self._pipes.stdout], [], [], _POLL_SECONDS)
                ended = self._process.poll() is not None
                reports, counts = self._read()
                for sentence in reports:
                    _log.warning("webhook %s", sentence)
                note_progress()
                if ended:
                    break
            self._end()
            return counts | {"dropped": counts["dropped"] + self.dropped} if counts else counts

    # --- the process: called with the lock ----------------------------------------------------------------------------

    @property
    def _pipes(self) -> Pipes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return Pipes(stdin=process.stdin, stdout=process.stdout)

    def _start(self) -> None:
        again, self._starts = self._starts > 0, self._starts + 1
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smalti_health.webhooks.delivery.sender", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._starts = STARTS + 1
            _log.warning("no events are sent to webhooks: %s", error)
            return
        os.set_blocking(self._pipes.stdin.fileno(), False)
        os.set_blocking(self._pipes.stdout.fileno(), False)
        with suppress(OSError):  # a user may have too many large pipes
            fcntl.fcntl(self._pipes.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        setup = self._setup
        if again:  # the events that the last one had not delivered
            setup = replace(setup, takes_over=True)
            self._list.extendleft(reversed(self._critical))
            self._critical.clear()
        self._printed, self._rest = b"", setup.to_json().encode() + b"\n"

    def _flush(self) -> None:
        """Write as much as the pipe takes now."""
        if self._process is None:
            if self._starts > STARTS:
                self._list.clear()
                return
            self._start()
        while self._process is not None and (self._rest or self._list):
            if not self._rest:
                line = self._list.popleft()
                self._rest = line.data
                if line.critical and line.data != b"{}\n":
                    self._critical.append(line)
            try:
                written = os.write(self._pipes.stdin.fileno(), self._rest)
            except BlockingIOError:
                return
            except OSError:  # it has died; the next call starts another one
                self._end()
                return
            self._rest = self._rest[written:]

    def _end(self) -> None:
        """Forget a sender that has ended, or that goes on for longer than it should. The outbox has what it has not sent."""
        if self._process is not None:
            with suppress(OSError):
                self._pipes.stdin.close()
            self._pipes.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
            self._process.kill()
            self._process.wait()
        self._process, self._rest = None, b""

    def _read(self) -> tuple[list[str], dict[str, int]]:
        """Reports, and the numbers at the end, as far as they have arrived."""
        reports: list[str] = []
        counts: dict[str, int] = {}
        if self._process is None:
            return reports, counts
        with suppress(OSError):
            while chunk := os.read(self._pipes.stdout.fileno(), 65536):
                self._printed += chunk
        *lines, self._printed = self._printed.split(b"\n")
        for line in lines:
            message = load_json(line)
            if "report" in message:
                reports.append(str(message["report"]))
            else:
                counts = message
        return reports, counts
