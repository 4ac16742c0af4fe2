"""Stacks of ranks that hang: each rank can be asked for them as soon as the ranks are connected."""

from __future__ import annotations

from smalti.hookspecs import hookimpl
from smalti.rundir import Phase
from smalti.system import StackDumps


class Hangs:
    """One per rank."""

    def __init__(self) -> None:
        self._stacks: StackDumps | None = None
        self._phase: Phase | None = None

    @hookimpl
    def on_rank_start(self) -> None:
        self._stacks = StackDumps()
        self._stacks.open()

    @hookimpl
    def on_phase(self, phase: Phase) -> None:
        self._phase = phase

    @hookimpl
    def on_rank_end(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
        self._stacks = None


plugin = Hangs()
