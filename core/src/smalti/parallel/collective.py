"""Ranks act alike: a failure on one is raised on every rank, so that none waits forever in the next collective call.

The step boundary is what a rank may save of the run while nothing else goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from smalti.errors import ExitCode, UserError
from smalti.parallel.failure_detection import Claim
from smalti.parallel.protocol import Communicator


class RankError(Exception):
    """An action failed on some rank.

    `fix` says what the user can do about it, "" if unknown; `errno` is the system's error number, such as ENOSPC. `unavailable`
    is whether the same command can succeed later: something did not answer, or was in use.
    """

    def __init__(self, message: str, *, fix: str, errno: int | None, unavailable: bool = False) -> None:
        super().__init__(message)
        self.fix = fix
        self.errno = errno
        self.unavailable = unavailable

    def for_user(self, kind: type[UserError] = UserError) -> UserError:
        """The same failure as an error for the user, with exit code 75 if it is `unavailable`."""
        error = kind(str(self), fix=self.fix)
        if self.unavailable:
            error.exit_code = ExitCode.UNAVAILABLE
        return error


def run_on_all_ranks(communicator: Communicator, action: Callable[[], str]) -> list[str]:
    """Run `action` on this rank; returns what it returned on each rank, in rank order. *Collective*.

    Raises `RankError` on all ranks if it failed on any. An exception that is neither an OSError nor a UserError is a defect: it
    is raised as it is on the rank where it occurred. `action` must not contain collective calls.
    """
    try:
        answer = action()
    except BaseException as error:
        user = error if isinstance(error, UserError) else None
        message = user.message if user else f"{error}" or type(error).__name__
        fix = user.fix if user else ""
        number = error.errno if isinstance(error, OSError) else None
        unavailable = user is not None and user.exit_code == ExitCode.UNAVAILABLE
        failure = {"failure": message, "fix": fix, "errno": number, "unavailable": unavailable}
        communicator.all_gather_text(json.dumps(failure))
        if isinstance(error, UserError | OSError):
            raise RankError(message, fix=fix, errno=number, unavailable=unavailable) from error
        raise
    answers = [json.loads(text) for text in communicator.all_gather_text(json.dumps({"answer": answer}))]
    for rank, other in enumerate(answers):
        if "failure" in other:
            message = f"rank {rank}: {other['failure']}"
            raise RankError(message, fix=other["fix"], errno=other["errno"], unavailable=other["unavailable"])
    return [str(other["answer"]) for other in answers]


def run_on_main_rank(communicator: Communicator, action: Callable[[], str], *, interval: float = 5.0) -> str:
    """Run `action` on the main rank, however long it takes; returns on every rank what it returned. *Collective*.

    Meanwhile the ranks exchange a message every `interval` seconds, so that no collective call times out. Raises `RankError` on
    all ranks, as `run_on_all_ranks` does.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        work = pool.submit(action) if communicator.world.is_main else None

        def look() -> str:
            if work is None:
                return ""
            finished, _ = wait([work], timeout=interval)
            return json.dumps(work.result() if finished else None)

        while (answer := json.loads(run_on_all_ranks(communicator, look)[0])) is None:
            pass
    return str(answer)


class Boundary:
    """Weights, optimizer state and EMA do not change between two steps. Whatever changes them calls this before and after.

    `state_consistent`: they are those of the last step boundary. `final`: that was the last one of the run and it is saved, so
    a failure after it loses nothing.
    """

    def __init__(self, claim: Claim, device: str) -> None:
        self.state_consistent = True
        self.final = False
        self._claim = claim
        self._event = torch.Event(device) if torch.device(device).type != "cpu" else None

    def leave(self) -> None:
        """They are about to change. Raises BrokenGroupError once another rank is known to be lost.

        Then what ranks have just computed together can be anything, without an error where it was computed.
        """
        with self._claim.changing():
            self.state_consistent = False

    def reach(self) -> None:
        """They are what they are to be, as soon as an accelerator has done all that it was asked for up to now."""
        if self._event is not None:
            self._event.record()
        self.state_consistent = True

    def stream(self, device: torch.device) -> torch.Stream:
        """For copies of them, to use in a `with` statement: it comes after the boundary, and waits for nothing else."""
        stream = torch.Stream(device)
        if self._event is not None:
            stream.wait_event(self._event)
        return stream
