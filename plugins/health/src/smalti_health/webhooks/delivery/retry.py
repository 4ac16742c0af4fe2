"""What follows an attempt: a pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from smalti_health.webhooks.delivery.request import Reply

Result = Literal["delivered", "retry", "failed", "disabled"]

BASE_SECONDS = 1.0
LONGEST_SECONDS = 300.0
LONGEST_RETRY_AFTER = 3600.0
ATTEMPTS = 6
"""Of an event that is not critical."""
CRITICAL_SECONDS = 3 * 86400.0
"""For how long a critical event is attempted, over all launches of a run."""
_TRANSIENT = (408, 425, 429)


@dataclass(frozen=True, kw_only=True)
class Next:
    """What to do with an event: `seconds` is how long to wait before the next attempt."""

    result: Result
    seconds: float = 0.0


def after(reply: Reply, attempts: int, *, critical: bool, age: float, uniform: Callable[[float, float], float]) -> Next:
    """What follows the attempt number `attempts`, from 1. `age` is that of the event in seconds.

    Waits are uniform between 0 and a bound that doubles ("full jitter"), and not shorter than a Retry-After. A redirect and a
    request that the receiver refuses (4xx) end an event that is not critical. A critical one is attempted for days.
    """
    status = reply.status
    if status is not None and 200 <= status < 300:
        return Next(result="delivered")
    if status == 410:
        return Next(result="disabled")
    if reply.refused:
        return Next(result="failed")
    transient = status is None or status >= 500 or status in _TRANSIENT
    if not critical and (not transient or attempts >= ATTEMPTS):
        return Next(result="failed")
    if critical and age > CRITICAL_SECONDS:
        return Next(result="failed")
    bound = min(LONGEST_SECONDS, BASE_SECONDS * 2.0 ** min(attempts, 30))
    wait = max(uniform(0.0, bound), min(reply.retry_after or 0.0, LONGEST_RETRY_AFTER))
    return Next(result="retry", seconds=wait)
