"""The processes of all ranks, known to each other, so that those who are left can say who is gone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from smalti.errors import ExitCode, UserError
from smalti.parallel import Ranks
from smalti.process import Process

_PATIENCE = 3.0
"""Seconds in which a process that is being killed comes to its end."""


class LostRankError(UserError):
    """Another rank's process ended without a goodbye, so this one cannot go on."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The process of each rank, in rank order."""

    processes: tuple[Process, ...]

    @classmethod
    def meet(cls, ranks: Ranks) -> Crew:
        """*Collective*."""
        told = ranks.share(json.dumps(asdict(Process.current())))
        return cls(processes=tuple(Process(**json.loads(text)) for text in told))

    def explain(self, error: BaseException) -> LostRankError | None:
        """What an exception in the loop comes from, if it is the end of another rank; None where nobody is seen to be gone.

        Whether a process still runs can be seen on this machine only. Takes a few seconds if all are alive.
        """
        deadline = time.monotonic() + _PATIENCE
        while not (gone := [rank for rank, process in enumerate(self.processes) if process.alive() is False]):
            if time.monotonic() > deadline or len(self.processes) == 1:
                return None
            time.sleep(0.05)
        who = ", ".join(f"rank {rank} ({self.processes[rank]})" for rank in gone)
        told = str(error).partition("\n")[0]
        return LostRankError(
            f"{who} is gone, so this rank cannot go on; it noticed by {type(error).__name__}: {told}",
            fix="the first rank that failed tells why; after a kill look into the system's log (dmesg): out of memory?",
        )
