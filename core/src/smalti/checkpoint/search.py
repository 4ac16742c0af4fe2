"""Finds the checkpoint to resume from: the main rank chooses, and all ranks verify, each its share of the files."""

from __future__ import annotations

import json
from pathlib import Path

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import Verification, verify
from smalti.errors import CheckpointError, UserError
from smalti.parallel import Communicator, run_on_all_ranks


def find_on_all_ranks(communicator: Communicator, store: CheckpointStore, choice: str, *, shared: bool = True) -> Path | None:
    """Returns what `store.resolve(choice)` finds on the main rank, on every rank. *Collective*.

    Only the main rank's `store` is used. `shared` false: ranks on other nodes may not see it, and the others verify what is
    there. Raises RankError on all ranks if no checkpoint can be used.
    """
    if not communicator.world.is_main:
        return _help(communicator, shared)
    found: Path | UserError | OSError | None
    try:
        found = store.resolve(choice, check=lambda path: _check_together(communicator, path, shared))
    except (UserError, OSError) as failure:
        found = failure

    def exchange() -> str:
        if isinstance(found, Exception):
            raise found
        return json.dumps({"found": str(found or "")})

    run_on_all_ranks(communicator, exchange)
    return found if isinstance(found, Path) else None


def _help(communicator: Communicator, shared: bool) -> Path | None:
    """Verify shares until the main rank has found a checkpoint."""
    while True:
        message = json.loads(run_on_all_ranks(communicator, lambda: "")[0])
        if "found" in message:
            return Path(message["found"]) if message["found"] else None
        _read_share(communicator, Path(message["check"]), shared)


def _check_together(communicator: Communicator, path: Path, shared: bool) -> Verification:
    """On the main rank: let all ranks verify the checkpoint. If others find problems, verify all of it here.

    Raises CheckpointError if a rank sees other contents than this one; an older checkpoint would not help then.
    """
    run_on_all_ranks(communicator, lambda: json.dumps({"check": str(path)}))
    mine, problems = _read_share(communicator, path, shared)
    if not any(problems):
        return mine
    complete = verify(path, to_resume=True)
    if complete.ok:
        rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
        raise CheckpointError(
            f"rank {rank} sees other contents in {path} than rank 0, for which it is complete: {problem}",
            fix="make sure that all nodes share the same --output_dir, and try again",
        )
    return complete


def _read_share(communicator: Communicator, path: Path, shared: bool) -> tuple[Verification, list[str]]:
    """Returns this rank's verification, and the problems that each rank found. *Collective*."""
    rank, readers = communicator.world.rank, list(range(communicator.world.size))
    if not shared:
        seen = run_on_all_ranks(communicator, lambda: "seen" if path.is_dir() else "")
        readers = [0, *(each for each in readers[1:] if seen[each])]
    if rank in readers:
        mine = verify(path, rank=readers.index(rank), ranks=len(readers), to_resume=True)
    else:
        mine = Verification(path=path, manifest=None, problems=())
    return mine, run_on_all_ranks(communicator, lambda: "; ".join(mine.problems[:3]))
