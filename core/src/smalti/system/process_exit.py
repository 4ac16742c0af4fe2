"""A process that ends without the teardown of C++ libraries. Importing this module imports no torch."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Self

from smalti.system.streams import flush_standard_streams


@dataclass
class ProcessExit:
    """Exits the process with `code` after Python's own exit handlers. While `code` is None, the process exits as usual.

    This skips the teardown of modules and C++ libraries. With torch and diffusers loaded it takes a second or two, and rarely
    one of torch's threads aborts the process during it ("terminate called without an active exception"): a completed run would
    look like a failed one.
    """

    code: int | None = None

    @classmethod
    def install(cls) -> Self:
        """Register it for this process. It runs after every exit handler that is registered later: call it before imports."""
        end = cls()
        atexit.register(end)
        return end

    def __call__(self) -> None:
        if self.code is None:
            return
        flush_standard_streams()
        os._exit(self.code)
