"""What is written about ranks that wait or hang: a line on the console, an event, and at a hang a file with all stacks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from smalti import RankInfo, RunState
from smalti.rundir import EventWriter, Ownership, RunDirectory
from smalti.system import Process
from smalti_health.hangs.flight_recorder import Call, sentence
from smalti_health.hangs.rank_progress import RankProgress, Standstill, described
from smalti_health.hangs.stacks import StackDumps

FOLDER = "hangs"
_STACK_SECONDS = 5.0
_log = logging.getLogger(__name__)


def report_waiting(info: RankInfo, state: RunState, message: str) -> None:
    """Say for whom the ranks wait: on the console, and as an event."""
    print(f"smalti: {message}", file=sys.stderr, flush=True)
    _event(info, state, message)


def report_hang(
    info: RankInfo,
    state: RunState,
    found: Standstill,
    ranks: Mapping[int, RankProgress],
    here: Mapping[int, Process],
    stacks: StackDumps,
    *,
    main: bool,
) -> None:
    """Write the stacks of the ranks of this machine (`here`) into a file; `main` also says what hangs."""
    states = {rank: process.status() for rank, process in here.items()}
    calls = {rank: {call["group"]: Call(**call) for call in known.calls} for rank, known in ranks.items() if known.calls}
    summary = described(found, ranks, time.time(), lambda rank: states.get(rank, ""))
    message = "; ".join(filter(None, (f"the run hangs: {summary}", sentence(calls, info.world.size))))
    running = {rank: process for rank, process in here.items() if states[rank] not in ("stopped", "tracing-stop")}
    dumps = stacks.collect(running, _STACK_SECONDS)
    path = info.directory / FOLDER / f"step-{state.step:08d}.node-{info.world.node}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.writelines(_lines(message, ranks, states, dumps))
    except FileExistsError:
        path = path.with_name(f"{path.stem}.{time.time():.0f}.txt")
        path.write_text("".join(_lines(message, ranks, states, dumps)), encoding="utf-8")
    except OSError as error:
        _log.warning("the stacks could not be written: %s", error)
    if main:
        message = f"{message}; stacks: {path}"
        print(f"smalti: {message}", file=sys.stderr, flush=True)
    _event(info, state, message, stacks=info.directory / FOLDER / path.name)


def _lines(
    message: str, ranks: Mapping[int, RankProgress], states: Mapping[int, str], dumps: Mapping[int, str]
) -> Iterator[str]:
    yield f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n"
    for rank, known in sorted(ranks.items()):
        yield f"\nrank {rank}: process {known.process.get('pid')} on {known.process.get('host')}"
        yield f"{f' ({states[rank]})' if states.get(rank) else ''}, phase {known.phase}, step {known.step}, {known.place}\n"
        yield from (f"  last collective call of group {call['group']}: {call}\n" for call in known.calls)
        if rank in states:
            yield dumps.get(rank, "no stacks: the process does not answer\n")


def _event(info: RankInfo, state: RunState, message: str, *, stacks: Path | None = None) -> None:
    directory = RunDirectory(info.directory)
    if not Ownership(directory, info.id, info.started).confirm():
        return
    place = directory.node_events_file(info.world.node) if info.world.node else directory.events_file
    try:
        events = EventWriter(place)
        fields = {} if stacks is None else {"hang": True, "stacks": directory.relative(stacks)}
        events.append("warning", step=state.step or None, message=message, **fields)
        events.close()
    except OSError as error:
        _log.warning("an event is lost: %s", error)
