"""One rank's failure becomes every rank's, so that nobody waits for ever in the next collective call."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from smalti.errors import UserError
from smalti.parallel.protocol import Communicator


class RankError(Exception):
    """Some rank could not do its part.

    `fix` says what the user can do about it, where that is known; `errno` is the system's error number, such as ENOSPC.
    """

    def __init__(self, message: str, *, fix: str, errno: int | None) -> None:
        super().__init__(message)
        self.fix = fix
        self.errno = errno


def run_on_all_ranks(ranks: Communicator, action: Callable[[], str]) -> list[str]:
    """Run `action` on this rank; returns what it returned on each rank, in rank order. *Collective*.

    When it failed on any rank, raises `RankError` on all of them. Only a failure that is a defect (neither the system's
    nor the user's) stays itself on the rank where it happened. `action` must not contain collective calls.
    """
    try:
        answer = action()
    except BaseException as error:
        user = error if isinstance(error, UserError) else None
        told = user.message if user else f"{error}" or type(error).__name__
        fix = user.fix if user else ""
        number = error.errno if isinstance(error, OSError) else None
        ranks.all_gather_text(json.dumps({"failure": told, "fix": fix, "errno": number}))
        if isinstance(error, UserError | OSError):
            raise RankError(told, fix=fix, errno=number) from error
        raise
    answers = [json.loads(text) for text in ranks.all_gather_text(json.dumps({"answer": answer}))]
    for rank, other in enumerate(answers):
        if "failure" in other:
            raise RankError(f"rank {rank}: {other['failure']}", fix=other["fix"], errno=other["errno"])
    return [str(other["answer"]) for other in answers]


def run_on_main_rank(ranks: Communicator, action: Callable[[], str], *, timeout: float = 5.0) -> str:
    """Run `action` on the main rank, however long it takes, and give its answer on every rank. *Collective*.

    The ranks speak every `timeout` seconds meanwhile, so that none of them takes the main rank for lost. A failure is raised
    on all ranks, as `run_on_all_ranks` does.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        work = pool.submit(action) if ranks.world.is_main else None

        def look() -> str:
            if work is None:
                return ""
            finished, _ = wait([work], timeout=timeout)
            return json.dumps(work.result() if finished else None)

        while (answer := json.loads(run_on_all_ranks(ranks, look)[0])) is None:
            pass
    return str(answer)
