"""How each rank of a launch ended: one file per rank in a temporary folder, written by the ranks and read by the launcher.

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
"""The environment variable with that folder, set in all processes of a launch."""
SIGNALLED = 128
"""The exit status of an agent that stopped its ranks because of a signal is this plus the number of the signal."""
_KILLED = "killed.json"
_FILE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """How one rank ended, and when (`time`).

    `secondary` is set if the rank ended only because another rank was lost. Then `saved` describes the checkpoint that it saved
    before, and `killed_ranks` lists the ranks that it had to kill because they hung.
    """

    rank: int
    exit_code: int
    message: str
    time: float
    secondary: bool = False
    saved: str = ""
    killed_ranks: Sequence[int] = ()


def launched() -> bool:
    """Whether a launcher started this process. If not, it is the only one of its run."""
    return FOLDER_VARIABLE in os.environ


def write_exit_report(
    code: int,
    message: str,
    *,
    rank: int | None = None,
    secondary: bool = False,
    saved: str = "",
    killed_ranks: Sequence[int] = (),
) -> None:
    """Write the report of this rank, or of another `rank` of this node for which its agent reports.

    Does nothing if there is one already, or if no launcher started this process.
    """
    if not launched():
        return
    path = exit_report_file(rank)
    with suppress(FileNotFoundError):
        if path.read_bytes().strip():
            return
    report = ExitReport(
        rank=own_rank() if rank is None else rank,
        exit_code=int(code),
        message=message,
        time=time.time(),
        secondary=secondary,
        saved=saved,
        killed_ranks=killed_ranks,
    )
    _write(path, asdict(report))


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def exit_report_file(rank: int | None = None) -> Path:
    """The report file of a rank of this launch. Default: the rank of this process."""
    return Path(os.environ[FOLDER_VARIABLE]) / _of_rank(own_rank() if rank is None else rank)


def _of_rank(rank: int | str) -> str:
    return f"rank-{rank}.json"


def hook_file(rank: int | None = None) -> Path:
    """The file with the hook that a rank is executing (`smalti.system.current_hook`). Default: the rank of this process."""
    return Path(os.environ[FOLDER_VARIABLE]) / _hook_of(own_rank() if rank is None else rank)


def _hook_of(rank: int) -> str:
    return f"hook-{rank}"


def preallocate(folder: Path, ranks: Iterable[int]) -> None:
    """Create all these files at full size: a disk that fills up during the run cannot prevent the reports."""
    for rank in ranks:
        (folder / _hook_of(rank)).write_bytes(b" " * HOOK_FILE_BYTES)
        (folder / _of_rank(rank)).write_bytes(b" " * _FILE_BYTES)
    (folder / _KILLED).write_bytes(b" " * _FILE_BYTES)


def allocated_ranks(folder: Path) -> range:
    """The ranks whose files were created, which are consecutive."""
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob(_of_rank("*")))
    return range(ranks[0], ranks[-1] + 1) if ranks else range(0)


def _write(path: Path, content: object) -> None:
    """Write into a preallocated file. A report that cannot be written must not change the exit."""
    with suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
        file.write(json.dumps(content).encode())


def write_killed(signals: Mapping[int, int]) -> None:
    """Write, in the agent, which ranks were killed by which signals: they cannot report it themselves."""
    _write(Path(os.environ[FOLDER_VARIABLE]) / _KILLED, signals)


def read_exit_reports(folder: Path) -> list[ExitReport]:
    """The reports, earliest first. Ranks that wrote none are missing."""
    found = []
    for path in folder.glob("rank-*.json"):
        try:
            found.append(ExitReport(**json.loads(path.read_text(encoding="utf-8"))))
        except ValueError:
            continue  # the rank was killed while it wrote
    return sorted(found, key=lambda report: report.time)


def read_killed(folder: Path) -> dict[int, str]:
    """The names of the signals that killed ranks, by rank, as far as the agent saw them."""
    try:
        killed = json.loads((folder / _KILLED).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {int(rank): signal.Signals(number).name for rank, number in killed.items()}


@dataclass(frozen=True, kw_only=True)
class UnreturnedHook:
    """A hook that had not returned when its rank ended: its name and plugin, and what to do about the plugin."""

    hook: str
    fix: str = ""


def read_hooks(folder: Path, ranks: Iterable[int]) -> dict[int, UnreturnedHook]:
    """The hooks that had not returned, by rank. Ranks that ended outside of hooks are missing."""
    found: dict[int, UnreturnedHook] = {}
    for rank in ranks:
        with suppress(OSError):
            hook, _, fix = (folder / _hook_of(rank)).read_text(encoding="utf-8", errors="replace").strip().partition("\n")
            if hook:
                found[rank] = UnreturnedHook(hook=hook, fix=fix)
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """These ranks in a sentence: "rank 1", or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def describe(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the notes about the plugin that raised it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{error}{notes}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}{notes}"


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a process that ends with this exception."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.PREEMPTED if isinstance(error, Terminated) else ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, UserError | GpuFaultError) else ExitCode.FAILED
