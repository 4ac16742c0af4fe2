"""Output that cannot end the process: a closed terminal, a pipe without a reader, a full disk under a log file.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from threading import Lock, local
from typing import TextIO, cast


class WriteErrorsIgnored(TextIOWrapper):
    """A standard stream over the same buffer. Output that cannot be written is dropped silently."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        """Does not close the buffer, which belongs to the original stream."""


def ignore_write_errors(*names: str) -> None:
    """From now on, ignore failures to write to these streams of `sys`. Default: "stdout" and "stderr".

    For processes whose work matters more than their output. A stream that the process was started without is replaced.
    """
    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - stays open until exit
        elif isinstance(stream, TextIOWrapper) and not isinstance(stream, WriteErrorsIgnored):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, WriteErrorsIgnored(stream.buffer, stream.encoding, stream.errors, line_buffering=True))


def flush_standard_streams() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None in a process that was started without it
            with suppress(OSError, ValueError):  # closed by the reader
                stream.flush()


_reserved = False


def reserve_stdout(reserved: bool) -> None:
    """Whether from now on only commands themselves print on stdout, for example JSON. See `plugin_output`."""
    global _reserved
    _reserved = reserved


class _ByThread:
    """Standard output, which is standard error for threads that are in calls of plugins."""

    def __init__(self, own: TextIO) -> None:
        self.own = own

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr if getattr(_calls, "depth", 0) else self.own, name)


_calls, _lock, _running = local(), Lock(), 0
"""`_calls.depth` is how many calls of plugins the thread is in, `_running` how many all threads are in."""


@contextmanager
def plugin_output() -> Iterator[None]:
    """Around calls of plugins: what they print goes to stderr if stdout is reserved for a command.

    What other threads print meanwhile goes where it belongs, also if a plugin does not come back.
    """
    global _running
    if not _reserved:
        yield
        return
    with _lock:
        _running += 1
        if not isinstance(sys.stdout, _ByThread):
            sys.stdout = cast(TextIO, _ByThread(sys.stdout))
    _calls.depth = getattr(_calls, "depth", 0) + 1
    try:
        yield
    finally:
        _calls.depth -= 1
        with _lock:
            _running -= 1
            if not _running and isinstance(sys.stdout, _ByThread):
                sys.stdout = sys.stdout.own
