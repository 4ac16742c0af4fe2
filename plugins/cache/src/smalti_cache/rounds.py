"""Work of ranks that may take longer than one call of the process group may last."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import wait

from smalti.data import Threads
from smalti.parallel import Communicator, run_on_all_ranks
from smalti.system import load_json

_SECONDS = 5.0


def run_in_rounds(communicator: Communicator, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank, however long it takes; returns what it returned on each rank, in rank order. *Collective*.

    It runs in a thread. Meanwhile the ranks exchange a message every few seconds, so that none waits for a slower one longer
    than that, and a failure on one reaches all. Raises what `run_on_all_ranks` raises.
    """
    with Threads(1, "smalti-cache-work") as thread:
        work = thread.submit(lambda _: action(), None)

        def look() -> str:
            finished, _ = wait([work], timeout=_SECONDS)
            return json.dumps(work.result() if finished else None)

        while None in (answers := [load_json(answer) for answer in run_on_all_ranks(communicator, look)]):
            pass
    return [str(answer) for answer in answers]
