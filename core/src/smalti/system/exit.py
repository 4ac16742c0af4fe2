"""The very end of a process.

Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Self


@dataclass
class ProcessExit:
    """Ends the process with `code` when Python has ended all that is Python's; as ever, while there is none.

    What would come then is taking down modules and C++ libraries. With torch and diffusers loaded that lasts a second or two.
    Rarely, one of torch's threads is not ready for it and aborts the process ("terminate called without an active exception"):
    a run that is done would look like one that failed.
    """

    code: int | None = None

    @classmethod
    def install(cls) -> Self:
        """Of this process. Comes after all that others register for the end once this was called: so call it before imports."""
        end = cls()
        atexit.register(end)
        return end

    def __call__(self) -> None:
        if self.code is None:
            return
        flush_standard_streams()
        os._exit(self.code)


def flush_standard_streams() -> None:
    """Let go of all that was printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is for a process that was started without
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
