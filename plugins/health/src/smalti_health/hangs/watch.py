"""A thread beside the loop that publishes the progress of its rank, says whom the ranks wait for, and reports hangs.

Ranks learn of each other through the store of the rendezvous, not through the process group, in which they may hang. Nothing is
read while there is progress.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import smalti
from smalti import ExitCode, RankInfo, RunState
from smalti.parallel import ProgressBoard, RankWork, describe_work
from smalti.rundir import RunDirectory
from smalti.system import Process, current_hook, exit_within, load_json, seconds_without_progress
from smalti.training import StepTimes
from smalti_health.hangs.deadlines import Deadlines
from smalti_health.hangs.flight_recorder import Call, last_calls, own_dump
from smalti_health.hangs.options import HangOptions
from smalti_health.hangs.rank_progress import OwnTime, RankProgress, Standstill, described, process_of, standstill
from smalti_health.hangs.report import report_hang, report_waiting
from smalti_health.hangs.stacks import StackDumps
from smalti_health.hangs.stops import Interruption, asked_since, grace_of
from smalti_health.hangs.stragglers import Stragglers

EVERY_SECONDS = 1.0
PUBLISH_SECONDS = 10.0
"""How often progress within a phase is published, and the records of other ranks are read."""
IDLE_SECONDS = 30.0
"""After so long without progress a rank publishes where it is."""
NOTICE_SECONDS = (60.0, 300.0, 1800.0)
"""After so long the ranks that wait say for whom, and then every time the last of these has passed again."""
COMPARE_SECONDS = 60.0
"""How often the main rank compares the ranks."""
INTERRUPTED_SECONDS = 10.0
"""In which a single process that was interrupted makes progress again, or its save does. Then it ends."""
_FORWARD_KEPT = 50
_TORCH, _SMALTI = Path(torch.__file__).parent, Path(smalti.__file__).parent
_WAITS = f"{_SMALTI}/parallel/"
_COLLECTIVES = (f"{_TORCH}/distributed/", f"{_TORCH}/autograd/graph.py", _WAITS, f"{_TORCH}/nn/parallel/")
"""Where a main thread is that waits for other ranks: in a collective call, or in a backward pass that makes some."""
_MAYBE = (f"{_TORCH}/", f"{_SMALTI}/training/trainer.py")
"""Where it waits for an accelerator, which may wait for other ranks: if a collective call has not ended."""
_log = logging.getLogger(__name__)


def watch_for_hangs(info: RankInfo, state: RunState, options: HangOptions) -> HangWatch:
    """Start the watch of this rank. Its process group exists."""
    board = ProgressBoard.create(info.world.rank) if info.world.size > 1 else None
    watch = HangWatch(info, state, Deadlines(options.deadlines()), board, stops=options.on_hang == "stop")
    watch.start()
    return watch


class HangWatch:
    """On each rank, from when the ranks are connected. Call `note_step` after each step.

    `board` is None for a single process. `stops` ends the run at a hang; one that was asked to stop ends then in any case. With
    deadlines below a minute, ranks look more often.
    """

    def __init__(
        self,
        info: RankInfo,
        state: RunState,
        deadlines: Deadlines,
        board: ProgressBoard | None,
        *,
        stops: bool = False,
    ) -> None:
        self._steps = StepTimes()
        self._forward: deque[float] = deque(maxlen=_FORWARD_KEPT)
        self._stragglers = Stragglers()
        self._compared_at = time.time()
        self._info = info
        self._state = state
        self._deadlines = deadlines
        self._board = board
        self._stops = stops
        self._pace = max(0.02, min([1.0, *(seconds / 60 for seconds in deadlines.given.values() if seconds)]))
        self._own_time = OwnTime(2 * PUBLISH_SECONDS * self._pace)
        self._stacks = StackDumps(info.world.rank)
        self._process = Process.current()
        self._watched = threading.main_thread().ident or 0
        self._over = threading.Event()
        self._published: RankProgress | None = None
        self._read_at = 0.0
        self._notices = 0
        self._reported_of = 0.0
        self._ended = False
        self._interruption = Interruption()

    def start(self) -> None:
        self._stacks.open()
        if self._board is None:
            self._interruption.open()
        describe_work(self._work)
        describe_work(self._saving, "saving")
        threading.Thread(target=self._watch, name="smalti-hangs", daemon=True).start()

    def note_step(self, seconds: float, forward_seconds: float | None) -> None:
        """How long a step took, and its forward passes on this rank."""
        self._steps.add(seconds)
        if forward_seconds is not None:
            self._forward.append(forward_seconds)

    def close(self) -> None:
        self._over.set()
        self._stacks.close()
        self._interruption.close()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS * self._pace):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - what watches the run must not end it
                _log.warning("the watch for hangs has failed: %s: %s", type(error).__name__, error)
                return

    def _look(self) -> None:
        mine = self._own()
        if mine is None:
            return
        if self._changed(mine):
            self._published = mine
            if self._board is not None:
                self._board.publish(json.dumps(asdict(mine)))
        if mine.phase == "training" and self._info.world.is_main:
            self._compare_ranks(mine)
        idle = mine.published - mine.active
        if idle < IDLE_SECONDS * self._pace:
            self._notices = 0
        elif mine.published - self._read_at >= PUBLISH_SECONDS * self._pace:
            self._read_at = mine.published
            self._look_at_all(mine, idle)

    def _changed(self, mine: RankProgress) -> bool:
        """Whether the record is worth publishing: another phase, progress since, or where it stands still."""
        last = self._published
        if last is None or (last.phase, last.since, last.place) != (mine.phase, mine.since, mine.place):
            return True
        return mine.published - last.published >= PUBLISH_SECONDS * self._pace

    def _own(self) -> RankProgress | None:
        phases = self._info.phases
        phase = phases.current
        if phase is None:
            return None
        now, idle = time.time(), time.monotonic() - phases.active_at
        stands = idle >= IDLE_SECONDS * self._pace
        calls = tuple(last_calls(own_dump()).values()) if stands and self._board is not None else ()
        place, waits = self._place(calls) if stands else ("", False)
        return RankProgress(
            phase=phase.name,
            since=phase.begun,
            active=now - idle,
            published=now,
            step=self._state.step,
            place=place,
            waits=waits and self._info.world.size > 1,
            p95=self._steps.p95,
            done=phase.done,
            total=phase.total,
            forward=median(self._forward.copy()) if self._forward else 0.0,
            calls=tuple(asdict(call) for call in calls),
            process=asdict(self._process),
        )

    def _work(self) -> RankWork:
        """What other ranks may wait for. A hook between two steps can take longer than a step: as long as the first one."""
        phase, hook = self._info.phases.current, current_hook()
        limit = self._deadlines.seconds(phase.name, p95=None if hook else self._steps.p95) if phase is not None else 0.0
        doing = ", ".join(filter(None, (f"{phase}" if phase is not None else "starting", hook)))
        idle = time.monotonic() - self._info.phases.active_at
        if phase is not None and phase.name == "saving":
            idle = min(idle, seconds_without_progress())
        return RankWork(doing=doing, idle=idle, limit=limit)

    def _saving(self) -> RankWork:
        return RankWork(doing="saving", idle=seconds_without_progress(), limit=self._deadlines.seconds("saving"))

    def _place(self, calls: tuple[Call, ...]) -> tuple[str, bool]:
        """Where the main thread is, the innermost function that is Python's, and whether it waits for other ranks."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return "", False
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_WAITS) and frame.f_code.co_name.startswith("_"):
            frame = frame.f_back  # to the call by its name
        file = frame.f_code.co_filename
        place = f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
        return ", in ".join(filter(None, (place, current_hook()))), waits_in(file, calls)

    def _compare_ranks(self, mine: RankProgress) -> None:
        """On the main rank, now and then: report ranks whose forward passes are steadily slower."""
        if self._board is None or mine.published - self._compared_at < COMPARE_SECONDS * self._pace:
            return
        self._compared_at = mine.published
        seconds = {rank: known.forward for rank, known in self._read().items() if known.phase == "training"}
        for rank, score in self._stragglers.update(seconds).items():
            slower = f"rank {rank} is slower than the others: {score:.0%} of the usual speed of a forward pass"
            host = f" ({seconds[rank]:.3g} s); all ranks wait for it in each step"
            report_waiting(self._info, self._state, slower + host)

    def _look_at_all(self, mine: RankProgress, idle: float) -> None:
        rank, size, now = self._info.world.rank, self._info.world.size, time.time()
        ranks = {**self._read(), rank: mine}
        found = standstill(ranks, size, self._deadlines, now)
        speaks = rank == min(found.waiting or found.awaited)
        if self._notice_due(idle) and speaks and found.waiting and not found.hang:
            report_waiting(self._info, self._state, described(found, ranks, now))
        active_at = self._info.phases.active_at
        if found.hang and active_at != self._reported_of:  # once for each standstill
            self._reported_of = active_at
            self._hang(found, ranks, now)
        if not self._ended:
            self._end_if_asked(found, ranks, speaks=speaks)

    def _end_if_asked(self, found: Standstill, ranks: dict[int, RankProgress], *, speaks: bool) -> None:
        """End the run as for a lost rank if it was asked to stop and its ranks cannot agree on that. One with the state saves.

        They cannot if they hang, or if none of the awaited has made progress for a while and half of the grace is over.
        """
        asked = asked_since(RunDirectory(self._info.directory), self._state) or self._interruption.asked_since()
        if asked is None:
            return
        now, grace = time.time(), grace_of(self._info.config)
        still = all(
            rank in ranks and now - ranks[rank].active >= IDLE_SECONDS * self._pace for rank in found.awaited or found.waiting
        )
        if not found.hang and (grace is None or asked < grace / 2 or not still):
            return
        self._ended = True
        if speaks:
            who = "it" if self._board is None else "a rank that has the state"
            message = f"the run was asked to stop {asked:.0f} s ago, and makes no progress: {who} saves if possible, and ends"
            report_waiting(self._info, self._state, f"{message}; {described(found, ranks, now)}")
        if self._board is not None:
            self._board.alarm()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """End what hangs in a single process by an error, after which the state is saved, or else the process."""
        active_at = self._info.phases.active_at
        self._interruption.interrupt()
        if not self._over.wait(INTERRUPTED_SECONDS) and self._info.phases.active_at == active_at:
            print("smalti: ending now: what was saved before is complete, the steps since then are lost", file=sys.stderr)
            exit_within(INTERRUPTED_SECONDS, ExitCode.KILLED)

    def _notice_due(self, idle: float) -> bool:
        """Whether another of `NOTICE_SECONDS` has passed."""
        last = NOTICE_SECONDS[-1] * self._pace
        passed = sum(idle >= seconds * self._pace for seconds in NOTICE_SECONDS) + max(0, int(idle / last) - 1)
        due, self._notices = passed > self._notices, max(passed, self._notices)
        return due

    def _read(self) -> dict[int, RankProgress]:
        known: dict[int, RankProgress] = {}
        now, steady = time.time(), time.monotonic()
        texts = self._board.read(self._info.world.size) if self._board is not None else {}
        for rank, text in texts.items():
            with suppress(ValueError, TypeError):
                known[rank] = self._own_time.translate(rank, RankProgress(**load_json(text)), now, steady)
        return known

    def _hang(self, found: Standstill, ranks: dict[int, RankProgress], now: float) -> None:
        """Report it, from the lowest rank of each machine that can; then end the run if that is wanted."""
        here = {rank: process for rank, known in ranks.items() if (process := process_of(known)).alive() is not None}
        able = [rank for rank in here if now - ranks[rank].published < 3 * PUBLISH_SECONDS * self._pace]
        rank = self._info.world.rank
        if rank == min(able, default=rank):
            main = rank == min(found.waiting or found.awaited)
            report_hang(self._info, self._state, found, ranks, here, self._stacks, main=main)
        if self._stops and self._board is not None and (rank in found.waiting or not found.waiting):
            self._board.alarm()


def waits_in(file: str, calls: tuple[Call, ...]) -> bool:
    """Whether a main thread in a function of this file waits for other ranks; `calls` are its last collective calls."""
    return file.startswith(_COLLECTIVES) or (file.startswith(_MAYBE) and any(not call.ended for call in calls))
