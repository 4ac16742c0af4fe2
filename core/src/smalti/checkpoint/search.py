"""Which checkpoint to go on from: the main rank looks, and all ranks read, each its share of the files.

Reading takes as long as disk and digests need for weights, moments and averages; shared out, that much less.
"""

from __future__ import annotations

import json
from pathlib import Path

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import Verification, verify
from smalti.errors import CheckpointError, UserError
from smalti.parallel import Communicator, run_on_all_ranks


def find_on_all_ranks(ranks: Communicator, store: CheckpointStore, choice: str) -> Path | None:
    """What `store.resolve(choice)` finds on the main rank, on every rank. *Collective*.

    Only the main rank's `store` is asked. Raises RankError on all ranks when there is nothing that can be used.
    """
    if not ranks.world.is_main:
        return _help(ranks)
    found: Path | UserError | OSError | None
    try:
        found = store.resolve(choice, check=lambda path: _check_together(ranks, path))
    except (UserError, OSError) as failure:
        found = failure

    def tell() -> str:
        if isinstance(found, Exception):
            raise found
        return json.dumps({"found": str(found or "")})

    run_on_all_ranks(ranks, tell)
    return found if isinstance(found, Path) else None


def _help(ranks: Communicator) -> Path | None:
    """Read shares until the main rank has found something."""
    while True:
        word = json.loads(run_on_all_ranks(ranks, lambda: "")[0])
        if "found" in word:
            return Path(word["found"]) if word["found"] else None
        _read_share(ranks, Path(word["check"]))


def _check_together(ranks: Communicator, path: Path) -> Verification:
    """On the main rank: have all ranks read the checkpoint. What others find wrong it looks at itself.

    Raises CheckpointError when a rank sees something else than this one: an older checkpoint would be no remedy for that.
    """
    run_on_all_ranks(ranks, lambda: json.dumps({"check": str(path)}))
    mine, told = _read_share(ranks, path)
    if not any(told):
        return mine
    whole = verify(path, to_resume=True)
    if whole.ok:
        rank, problem = next((rank, problem) for rank, problem in enumerate(told) if problem)
        raise CheckpointError(
            f"rank {rank} sees another {path} than rank 0, which finds it whole: {problem}",
            fix="make sure that all machines see one and the same --output_dir, and try again",
        )
    return whole


def _read_share(ranks: Communicator, path: Path) -> tuple[Verification, list[str]]:
    """This rank's finding, and what each rank has found wrong. *Collective*."""
    mine = verify(path, rank=ranks.world.rank, ranks=ranks.world.size, to_resume=True)
    return mine, run_on_all_ranks(ranks, lambda: "; ".join(mine.problems[:3]))
