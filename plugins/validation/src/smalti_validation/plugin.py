"""Validation images and the loss on held-out images. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import PeriodicEntry, Problem, UserError, hookimpl, problems_in

if TYPE_CHECKING:
    from smalti import CommandCollector, Config, OptionGroup

IMAGES = PeriodicEntry(name="validation", title="validation images", factory="smalti_validation.work:validation_of")
LOSS = PeriodicEntry(
    name="evaluation", title="loss on held-out images", factory="smalti_validation.evaluation:Evaluation", order=1
)
SCORES = PeriodicEntry(
    name="scores", title="scores of validation images", factory="smalti_validation.scores:scores_of", order=2
)


class ValidationPlugin:
    """Active where it is installed. Without prompts and without held-out images, it does nothing."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti import OptionGroup
        from smalti_validation.options import ValidationOptions

        return [OptionGroup(name="validation", title="Validation", options=ValidationOptions)]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_validation.prompts import validation_prompts

        try:
            validation_prompts(config)
        except UserError as error:
            return list(problems_in(error))
        return []

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Show which noise levels overfit, and which images are learned least."
        commands.below("run").add_deferred("smalti_validation.command:report", summary)

    @hookimpl
    def register_periodic_work(self) -> list[PeriodicEntry]:
        return [IMAGES, LOSS, SCORES]


plugin = ValidationPlugin()
