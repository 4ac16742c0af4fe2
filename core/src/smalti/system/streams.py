"""Words to people, who may be gone: a terminal that was closed, a pipe that nobody reads, a full disk under a log file.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path


class WriteErrorsIgnored(TextIOWrapper):
    """The standard stream over the same buffer. What cannot be written is lost, and nobody is told: there is no one to tell."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        """Leave the buffer open, which is another's."""


def ignore_write_errors(*names: str) -> None:
    """From now on no failure to write to these streams of `sys` ends this process; "stdout" and "stderr" if none are named.

    For processes whose work matters more than their words. A stream that a process was started without takes words, too.
    """
    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for life
        elif isinstance(stream, TextIOWrapper) and not isinstance(stream, WriteErrorsIgnored):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, WriteErrorsIgnored(stream.buffer, stream.encoding, stream.errors, line_buffering=True))
