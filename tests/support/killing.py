"""Processes that are killed at a moment that the caller chooses."""

import os
import signal
import time
from collections.abc import Callable


def kill_after(delay: float, work: Callable[[Callable[[int], object]], object]) -> int:
    """Run `work(acknowledge)` in a forked process, and send it SIGKILL `delay` seconds after it first acknowledged a number.

    Returns the last number that it acknowledged. `work` must not return.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            work(lambda number: os.write(send, number.to_bytes(8, "big")))
        finally:
            os._exit(3)
    os.close(send)
    acknowledged = os.read(receive, 8)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(receive, "rb") as pipe:
        acknowledged += pipe.read()
    assert acknowledged, "the process ended before it acknowledged anything"
    return int.from_bytes(acknowledged[-8:], "big")
