"""Output that cannot end the process: a closed terminal, a pipe without a reader, a full disk under a log file.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from io import TextIOWrapper
from pathlib import Path


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


def plugin_output() -> AbstractContextManager[object]:
    """Around calls of plugins: what they print goes to stderr if stdout is reserved for a command."""
    return redirect_stdout(sys.stderr) if _reserved else nullcontext()
