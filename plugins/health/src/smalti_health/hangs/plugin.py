"""Watches each rank from outside of its loop: ranks that hang, and those that are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import RankInfo, RunState, StepResult, hookimpl

if TYPE_CHECKING:
    from smalti import OptionGroup
    from smalti_health.hangs.watch import HangWatch


class Hangs:
    """One watch per rank."""

    def __init__(self) -> None:
        self._watch: HangWatch | None = None

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_health.hangs.options import GROUP

        return [GROUP]

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti_health.hangs.options import HangOptions
        from smalti_health.hangs.watch import watch_for_hangs

        self._watch = watch_for_hangs(info, state, info.config[HangOptions])

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._watch is not None:
            self._watch.note_step(result.seconds, result.forward_seconds)

    @hookimpl
    def on_rank_end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None


plugin = Hangs()
