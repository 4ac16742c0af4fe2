"""What watches each rank from outside of its loop: hangs, and the circuit of its node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.config import RunOptions
from smalti.hookspecs import hookimpl
from smalti.rundir import close_circuit
from smalti.types import RankInfo, RunState, StepResult

if TYPE_CHECKING:
    from smalti.training import HangWatch


class Hangs:
    """One per rank."""

    def __init__(self) -> None:
        self._watch: HangWatch | None = None
        self._directory = Path()
        self._node: int | None = None

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti.training import watch_for_hangs

        self._directory = info.directory
        self._node = info.world.node if info.world.local_rank == 0 else None
        self._watch = watch_for_hangs(info, state, info.config[RunOptions])

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        """The first step closes the circuit of the node, if a fault has opened it."""
        if self._watch is not None:
            self._watch.note_step(result.seconds, result.forward_seconds)
        if self._node is not None:
            with suppress(OSError):
                close_circuit(self._directory, self._node)
            self._node = None

    @hookimpl
    def on_rank_end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None


plugin = Hangs()
