"""Stacks of ranks that hang: each rank can be asked for them as soon as the ranks are connected."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from smalti.hookspecs import hookimpl
from smalti.rundir import Phase, close_circuit
from smalti.system import StackDumps
from smalti.types import RankInfo


class Hangs:
    """One per rank."""

    def __init__(self) -> None:
        self._stacks: StackDumps | None = None
        self._phase: Phase | None = None
        self._directory = Path()
        self._node: int | None = None

    @hookimpl
    def on_rank_start(self, info: RankInfo) -> None:
        self._directory = info.directory
        self._node = info.world.node if info.world.local_rank == 0 else None
        self._stacks = StackDumps()
        self._stacks.open()

    @hookimpl
    def on_phase(self, phase: Phase) -> None:
        self._phase = phase

    @hookimpl
    def on_step_end(self) -> None:
        """The first step closes the circuit of the node, if a fault has opened it."""
        if self._node is not None:
            with suppress(OSError):
                close_circuit(self._directory, self._node)
            self._node = None

    @hookimpl
    def on_rank_end(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
        self._stacks = None


plugin = Hangs()
