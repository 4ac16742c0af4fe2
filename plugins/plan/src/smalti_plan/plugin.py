"""`smalti plan`, `smalti config new`, the forecast of memory before a launch, the explanation of errors of memory.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CacheEntry, CommandCollector, DistributedPlan, RankInfo, RunState, UserError, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup
    from smalti.rundir import EventWriter, RunDirectory
    from smalti_plan.compiled import Keeping
    from smalti_plan.forecast import Forecast


CACHES = (
    CacheEntry(name="compiled", title="code of compiled models", factory="smalti_plan.compiled:CompiledCode"),
    CacheEntry(name="model-facts", title="counted models, of smalti plan", factory="smalti_plan.counted:facts_cache"),
    CacheEntry(name="rehearsals", title="rehearsed runs, of smalti plan", factory="smalti_plan.rehearsal.rehearse:cache"),
    CacheEntry(
        name="plan-calibrations", title="measured steps, of smalti plan", factory="smalti_plan.calibration:calibrations"
    ),
)


class Plan:
    """Active where it is installed; the planner is imported when it is used."""

    def __init__(self) -> None:
        self._forecast: Forecast | None = None
        self._keeping: Keeping | None = None

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_plan.options import GROUP

        return [GROUP]

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Say what fits on which GPUs, and what is fastest, before a launch."
        commands.add_deferred("smalti_plan.command:plan", summary, section="Training")
        summary = "Write a configuration for a model, a card and a folder of images."
        commands.below("config").add_deferred("smalti_plan.presets.command:new", summary)

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        return list(CACHES)

    @hookimpl
    def notices_before_launch(self, config: Config, plan: DistributedPlan, kind: str) -> list[str]:
        from smalti_plan.options import PlanOptions

        self._forecast, notices = None, []
        if config[PlanOptions].fit_choice:
            from smalti_plan.limit.completing import Kept

            kept = Kept.of(config[PlanOptions].fit_choice)
            notices = [] if kept is None else [kept.line(config)]
        if config[PlanOptions].compile == "auto":
            from smalti_plan.compiled import notice

            notices += filter(None, [notice(config)])
        choice = config[PlanOptions].memory_forecast
        if choice == "off" or (choice == "auto" and kind == "cpu"):
            return notices
        from smalti_plan.forecast import forecast_of

        self._forecast = forecast_of(config, plan, kind)
        return notices if self._forecast is None else [*notices, *self._forecast.notices]

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti.config import LaunchOptions
        from smalti_plan.compiled import BACKEND, Keeping

        self._keeping = None
        if info.config[LaunchOptions].dynamo_backend == BACKEND:
            from smalti_plan.probe import accelerator

            name = "cpu" if info.world.device.startswith("cpu") else str(accelerator().get("name"))
            self._keeping = Keeping(info.config, name, notes=info.world.is_main)

    @hookimpl
    def on_step_end(self) -> None:
        if self._keeping is not None:
            self._keeping.step()

    @hookimpl
    def on_launch_end(self, directory: RunDirectory, events: EventWriter) -> list[str]:
        forecast, self._forecast = self._forecast, None
        if forecast is None or (compared := forecast.compared(directory)) is None:
            return []
        measured, line = compared
        events.append("memory", step=None, measured=int(measured), **forecast.event())
        return [f"{'memory':<12} {line}"]

    @hookimpl
    def explain_error(self, error: Exception, info: RankInfo, run: object | None) -> UserError:
        from smalti.training import Run
        from smalti_plan.out_of_memory import explained

        return explained(error, info, run if isinstance(run, Run) else None)


plugin = Plan()
