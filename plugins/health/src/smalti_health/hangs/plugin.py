"""Watches each rank from outside of its loop: ranks that hang, and those that are slow, as a model that is not compiled is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import RankInfo, RunState, StepResult, hookimpl

if TYPE_CHECKING:
    from smalti import OptionGroup
    from smalti_health.graphs import GraphWatch
    from smalti_health.hangs.watch import HangWatch


class Hangs:
    """One watch per rank; one of them looks at what was compiled, which is alike on all."""

    def __init__(self) -> None:
        self._watch: HangWatch | None = None
        self._graphs: GraphWatch | None = None

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_health.hangs.options import GROUP

        return [GROUP]

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti.config import LaunchOptions
        from smalti_health.hangs.options import HangOptions
        from smalti_health.hangs.watch import watch_for_hangs

        self._watch = watch_for_hangs(info, state, info.config[HangOptions])
        backend = info.config[LaunchOptions].dynamo_backend
        self._graphs = None
        if backend is not None and info.world.is_main:
            from smalti_health.graphs import GraphWatch

            self._graphs = GraphWatch(backend)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._watch is not None:
            self._watch.note_step(result.seconds, result.forward_seconds)
        if self._graphs is not None:
            self._graphs.look()

    @hookimpl
    def on_rank_end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch, self._graphs = None, None


plugin = Hangs()
