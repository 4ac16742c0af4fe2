"""What smalti asks of this package. Imports neither torch nor DeepSpeed until a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import (
    Block,
    CacheEntry,
    CheckpointFormat,
    CommandCollector,
    DistributedPlan,
    Finding,
    OptimizerEntry,
    Strategy,
    World,
    hookimpl,
)
from smalti_deepspeed.formats import FORMATS

if TYPE_CHECKING:
    from torch import nn

    from smalti import Config, OptionGroup, Problem
    from smalti.models import Weights
    from smalti.parallel import Parallel


class DeepSpeed:
    """Claims every run that has a DeepSpeed configuration."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_deepspeed.derived_options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_deepspeed.checks import problems

        return problems(config)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_deepspeed.commands:deepspeed", "Build, check and store DeepSpeed configurations.")

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        from smalti_deepspeed.optimizers import ENTRIES

        return list(ENTRIES)

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        title, factory = "what DeepSpeed left on the drive", "smalti_deepspeed.offload_folder:of_config"
        return [CacheEntry(name="deepspeed-offload", title=title, factory=factory, configured=True)]

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        from smalti_deepspeed.options import enabled

        if not enabled(config):
            return None
        from smalti.config import LaunchOptions, OptimizerOptions
        from smalti_deepspeed.accelerate_export import fragment
        from smalti_deepspeed.config import offload_folders, resolved
        from smalti_deepspeed.optimizers import deepspeed_name

        document = resolved(config, world_size=config[LaunchOptions].num_processes)
        return DistributedPlan(
            name="deepspeed",
            title="DeepSpeed",
            parallel="smalti_deepspeed.engine:DeepSpeedParallel",
            accelerate=fragment(config),
            settings=document,
            shards=True,
            flattens_parameters=deepspeed_name(config[OptimizerOptions].optimizer) != "Muon",  # which is gathered into matrices
            check_model="smalti_deepspeed.offload_folder:check_free_space" if offload_folders(document) else "",
        )

    @hookimpl
    def propose_strategies(self, config: Config, world: World) -> list[Strategy]:
        from smalti_deepspeed.proposals import proposals

        return proposals(config, world)

    @hookimpl
    def wrap_model(self, model: nn.Module, blocks: list[Block], parallel: Parallel, weights: Weights) -> nn.Module | None:
        from smalti_deepspeed.engine import DeepSpeedParallel

        return parallel.wrap(model, blocks, weights) if isinstance(parallel, DeepSpeedParallel) else None

    @hookimpl
    def register_checkpoint_formats(self) -> list[CheckpointFormat]:
        return list(FORMATS)

    @hookimpl
    def diagnose(self, config: Config | None) -> list[Finding]:
        from smalti_deepspeed.findings import deepspeed_findings

        return deepspeed_findings(config)


plugin = DeepSpeed()
