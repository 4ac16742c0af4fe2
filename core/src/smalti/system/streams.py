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
from threading import get_ident
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


def reserve_stdout(reserved: bool) -> None:
    """Whether from now on only this thread prints on stdout, outside of calls of plugins, for example JSON.

    What plugins print goes to stderr, from whichever thread. See `plugin_output`.
    """
    if isinstance(sys.stdout, _Reserved):
        sys.stdout = sys.stdout.own
    if reserved and sys.stdout is not None:  # None in a process that was started without it
        sys.stdout = cast(TextIO, _Reserved(sys.stdout))


class _Reserved:
    """Standard output for the thread that makes it, while it is in no call of plugins; standard error for all else."""

    def __init__(self, own: TextIO) -> None:
        self.own, self.thread, self.calls = own, get_ident(), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.own if get_ident() == self.thread and not self.calls else sys.stderr, name)


@contextmanager
def plugin_output() -> Iterator[None]:
    """Around calls of plugins: what they print goes to stderr if stdout is reserved for a command."""
    stdout = sys.stdout
    if not isinstance(stdout, _Reserved) or get_ident() != stdout.thread:
        yield
        return
    stdout.calls += 1
    try:
        yield
    finally:
        stdout.calls -= 1
