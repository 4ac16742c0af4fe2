"""Copies of the indexes on a drive of each node, for run directories on a network file system.

Ranks read indexes and rows by bucket page by page, at random places. A local drive answers in a tenth of a millisecond, a
network file system in milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from hashlib import sha256
from pathlib import Path

from smalti.data.scan.tasks import VISIBLE_SECONDS
from smalti.data.threads import Threads
from smalti.parallel import Communicator, run_on_all_ranks

_COPIED = ("*.arrow", "*.rows")
_ROUND_SECONDS = 5.0
_Sizes = dict[str, tuple[int, int]]
"""Size and time of each file, by name."""


def copy_to_node(directory: Path, root: Path, communicator: Communicator) -> Path:
    """Bring the copy of the indexes in `directory` up to date on each node; returns its folder below `root`. *Collective*.

    Files that have not changed are not copied again. Raises RankError.
    """
    world = communicator.world
    target = root.expanduser().absolute() / sha256(str(directory.absolute()).encode()).hexdigest()[:16]
    answers = run_on_all_ranks(communicator, lambda: json.dumps(_sizes(directory)) if world.is_main else "")
    wanted: _Sizes = {name: (size, changed) for name, (size, changed) in json.loads(answers[0]).items()}
    with Threads(1, "smalti-copy") as pool:
        work = pool.submit(lambda sizes: _copy(directory, target, sizes), wanted) if world.local_rank == 0 else None

        def look() -> str:
            deadline = time.monotonic() + _ROUND_SECONDS
            while work is not None and not work.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            if work is None or work.done():
                if work is not None:
                    work.result()
                return "copied"
            return ""

        while not all(run_on_all_ranks(communicator, look)):
            pass
    return target


def _sizes(folder: Path) -> _Sizes:
    found = {path.name: path.stat() for pattern in _COPIED for path in sorted(folder.glob(pattern)) if path.is_file()}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def _copy(directory: Path, target: Path, wanted: _Sizes) -> None:
    target.mkdir(parents=True, exist_ok=True)
    there = _sizes(target)
    for name, (size, changed) in wanted.items():
        if there.get(name) == (size, changed):
            continue
        _wait_for(directory / name, size)
        draft = target / f".{name}.{os.getpid()}"
        try:
            shutil.copyfile(directory / name, draft)
            os.utime(draft, ns=(changed, changed))
            draft.replace(target / name)
        finally:
            draft.unlink(missing_ok=True)
    for name in there.keys() - wanted.keys():
        (target / name).unlink()  # of a dataset that the run no longer has


def _wait_for(path: Path, size: int) -> None:
    """Until what the main rank has written is visible here. Raises FileNotFoundError."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not path.exists() or path.stat().st_size != size:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{path}, which the main rank has written, is not visible here: is the run directory shared?"
            )
        time.sleep(0.1)
