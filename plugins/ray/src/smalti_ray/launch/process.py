"""The process of one worker: `smalti train`, asked to stop through a pipe. Started by `smalti_ray.launch.worker`.

    python -m smalti_ray.launch.process REQUESTS RESULT WORDS...

It leaves the process that has started it: Ray kills the children of a worker that it ends, and a save would be cut short. The
end of the pipe REQUESTS is a request to stop: so the loss of Ray's worker, raylet or driver saves too. RESULT is the pipe for
the exit code. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress


def main() -> None:
    requests, result, *words = sys.argv[1:]
    if os.fork():
        os._exit(0)
    os.setsid()
    run(int(requests), int(result), words)


def run(requests: int, result: int, words: Sequence[str]) -> None:
    """Train with these arguments, and write the exit code to `result`. A request to stop has the effect of SIGTERM, once."""
    for descriptor in (requests, result):
        os.set_inheritable(descriptor, False)  # else a rank would keep them open

    def wait() -> None:
        os.read(requests, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="smalti-requests", daemon=True).start()
    take_usual_priority()
    from smalti.cli import main as smalti

    code = 1
    try:
        smalti(["train", *words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        with suppress(BrokenPipeError):  # Ray's worker is lost
            os.write(result, f"{code}".encode())


def take_usual_priority() -> None:
    """Ray starts its workers at nice 15, which is for tasks beside others; ranks of a run have their node to themselves.

    Only root may change that here. Others set RAY_worker_niceness=0 for `ray start`.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))


if __name__ == "__main__":
    main()
