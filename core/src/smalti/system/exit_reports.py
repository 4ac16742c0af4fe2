"""How each rank of a launch has ended, told by the processes that know it to the one that has started them: files in a folder.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from smalti.errors import ExitCode, GpuFaultError, UserError
from smalti.system.current_hook import FILE_BYTES as HOOK_FILE_BYTES
from smalti.system.signals import Terminated

FOLDER_VARIABLE = "SMALTI_OUTCOME_DIR"
"""Set in all processes of a launch."""
SIGNALLED = 128
"""The exit status of a launcher's agent that a signal has made to stop its ranks is this and the signal's number."""
_KILLED = "killed.json"
_FILE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """What one rank said when it ended; `time` orders the ranks' last words.

    `follows`: only the loss of another rank ended it; then `saved` tells of the checkpoint that it made of its own before, and
    `ended` which ranks it had to kill because they hung.
    """

    rank: int
    exit_code: int
    message: str
    time: float
    follows: bool = False
    saved: str = ""
    ended: Sequence[int] = ()


def launched() -> bool:
    """Whether this process is one of a launch, or else the only one."""
    return FOLDER_VARIABLE in os.environ


def write_exit_report(code: int, message: str, *, follows: bool = False, saved: str = "", ended: Sequence[int] = ()) -> None:
    """This rank's; the first word counts. Nothing is written where nobody has launched it."""
    if not launched():
        return
    _leave(
        ExitReport(
            rank=own_rank(),
            exit_code=int(code),
            message=message,
            time=time.time(),
            follows=follows,
            saved=saved,
            ended=ended,
        )
    )


def write_exit_report_for(rank: int, message: str) -> None:
    """By the launcher's agent: why it had to kill a rank that did not leave by itself. The rank's own word counts."""
    _leave(ExitReport(rank=rank, exit_code=int(ExitCode.KILLED), message=message, time=time.time(), follows=True))


def _leave(end: ExitReport) -> None:
    path = exit_report_file(end.rank)
    with suppress(FileNotFoundError):
        if path.read_bytes().strip():
            return
    _write(path, asdict(end))


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def exit_report_file(rank: int | None = None) -> Path:
    """Where a rank of this launch leaves its word; this process's own if none is named."""
    return Path(os.environ[FOLDER_VARIABLE]) / _of_rank(own_rank() if rank is None else rank)


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.json"


def hook_file(rank: int | None = None) -> Path:
    """Where a rank of this launch keeps the hook that it is in (`smalti.system.current_hook`); this process's own if none is
    named.
    """
    return Path(os.environ[FOLDER_VARIABLE]) / _hook_of(own_rank() if rank is None else rank)


def _hook_of(rank: int) -> str:
    return f"hook-{rank}"


def preallocate(folder: Path, ranks: Iterable[int]) -> None:
    """Keep room for all these words: a disk that fills up meanwhile does not make a good end look like none."""
    for rank in ranks:
        (folder / _hook_of(rank)).write_bytes(b" " * HOOK_FILE_BYTES)
        (folder / _of_rank(rank)).write_bytes(b" " * _FILE_BYTES)
    (folder / _KILLED).write_bytes(b" " * _FILE_BYTES)


def _write(path: Path, content: object) -> None:
    """In the room that was kept. A word that cannot be left is no reason to fail."""
    with suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
        file.write(json.dumps(content).encode())


def write_killed(signals: Mapping[int, int]) -> None:
    """By the launcher's agent: which ranks were killed by which signals, which they cannot tell themselves."""
    _write(Path(os.environ[FOLDER_VARIABLE]) / _KILLED, signals)


def read_exit_reports(folder: Path) -> list[ExitReport]:
    """The earliest first; without ranks that left no word."""
    found = []
    for path in folder.glob("rank-*.json"):
        try:
            found.append(ExitReport(**json.loads(path.read_text(encoding="utf-8"))))
        except ValueError:
            continue  # the rank was killed while it wrote
    return sorted(found, key=lambda end: end.time)


def read_killed(folder: Path) -> dict[int, str]:
    """The names of the signals that killed ranks, as far as the agent saw them."""
    try:
        killed = json.loads((folder / _KILLED).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {int(rank): signal.Signals(number).name for rank, number in killed.items()}


@dataclass(frozen=True, kw_only=True)
class UnreturnedHook:
    """The hook in which a rank ended without coming back from it, in words, and what to do about its plugin, if anything."""

    hook: str
    fix: str = ""


def read_hooks(folder: Path, ranks: Iterable[int]) -> dict[int, UnreturnedHook]:
    """By rank; without those that ended outside of hooks."""
    found: dict[int, UnreturnedHook] = {}
    for rank in ranks:
        with suppress(OSError):
            hook, _, fix = (folder / _hook_of(rank)).read_text(encoding="utf-8", errors="replace").strip().partition("\n")
            if hook:
                found[rank] = UnreturnedHook(hook=hook, fix=fix)
    return found


def describe(error: BaseException) -> str:
    """One line for the end of the output: kind, message and the notes about who raised it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, UserError):
        return f"{error}{notes}"
    return f"{type(error).__name__}: {error}{notes}"


def exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.PREEMPTED if isinstance(error, Terminated) else ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, UserError | GpuFaultError) else ExitCode.FAILED
