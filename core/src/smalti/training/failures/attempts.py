"""What a run can do without, such as validation images: tried by all ranks together, and reported when it fails.

All ranks have to know of a failure on one of them, or they would wait for it in the next collective call. So the work of a rank
is done between such calls, and what became of it is shared. Only where the ranks compute one forward pass together, because
weights or tokens are spread over them, can a rank that fails in its midst not tell the others: it leaves, and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smalti.errors import UserError
from smalti.parallel import Communicator
from smalti.plugins import summary, warn
from smalti.training.failures.faults import is_fault
from smalti.training.failures.out_of_memory import memory_explained
from smalti.training.run import Run

T = TypeVar("T")


class AttemptFailed(UserError):  # noqa: N818 - on most ranks nothing is wrong
    """Some rank could not do its part. Raised on every rank, so that they stay in step; `own` is what failed on this one."""

    def __init__(self, message: str, own: Exception | None) -> None:
        super().__init__(message)
        self.own = own


def on_all_ranks(communicator: Communicator, action: Callable[[], T]) -> T:
    """What `action` gives on this rank, once every rank has done it. *Collective*; `action` must not be.

    Raises AttemptFailed, on every rank, when it failed on any. A fault of the accelerator stays what it is.
    """
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(action())
    except Exception as error:
        if is_fault(error):
            raise
        failure = error
    failures = communicator.all_gather_text(summary(failure) if failure is not None else "")
    for rank, text in enumerate(failures):
        if text:
            raise AttemptFailed(f"rank {rank}: {text}" if len(failures) > 1 else text, failure) from failure
    return result[0]


def computed(run: Run, compute: Callable[[], T]) -> T:
    """What forward passes give on this rank. *Collective*.

    Raises as `on_all_ranks` where each rank makes its own: neither weights nor tokens are spread over them.
    """

    def explained() -> T:
        with memory_explained(run.plugins, run.state, run.info, run):
            return compute()

    together = run.world.size > 1 and (run.world.context > 1 or run.parallel.local_communicator() is None)
    return explained() if together else on_all_ranks(run.parallel, explained)


def attempt(run: Run, what: str, action: Callable[[Run], object]) -> str:
    """Do something that the run can do without; why it failed in a sentence, the same on every rank, or "". *Collective*."""
    try:
        action(run)
    except AttemptFailed as failed:
        message = f"{what} of step {run.state.step} failed: {failed}"
        warn(run.plugins, run.state, message, failed.own or failed, quiet=failed.own is None and not run.world.is_main)
        return message
    except Exception as error:
        error.add_note(f"in the {what} of step {run.state.step}")
        raise
    return ""
