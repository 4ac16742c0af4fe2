"""What smalti asks of this package. Imports neither torch nor DeepSpeed until a run is built."""

from __future__ import annotations

from smalti import Config, DistributedPlan, OptimizerEntry, OptionGroup, hookimpl
from smalti_deepspeed.implications import implied
from smalti_deepspeed.launchfile import fragment
from smalti_deepspeed.optimizers import ENTRIES
from smalti_deepspeed.options import DeepSpeedOptions, enabled
from smalti_deepspeed.translation import translate

GROUP = OptionGroup(name="deepspeed", title="DeepSpeed", options=DeepSpeedOptions, translate=translate, implies=implied)


class DeepSpeed:
    """Claims every run that has a DeepSpeed configuration."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return [GROUP]

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        return list(ENTRIES)

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        if not enabled(config):
            return None
        return DistributedPlan(
            name="deepspeed",
            title="DeepSpeed",
            parallel="smalti_deepspeed.engine:Engine",
            accelerate=fragment(config),
            shards=True,
        )


plugin = DeepSpeed()
