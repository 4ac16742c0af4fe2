"""What smalti asks of this package. Imports no torch until a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import Block, Config, DistributedPlan, OptionGroup, Problem, hookimpl
from smalti_fsdp2.checks import problems
from smalti_fsdp2.options import GROUPS, ContextOptions, FsdpOptions, enabled

if TYPE_CHECKING:
    from torch import nn

    from smalti.models.family import ModelFamily, Weights
    from smalti.parallel import Parallel


class Fsdp:
    """Claims every run that asks for FSDP, or for context parallelism."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        return problems(config)

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        if not enabled(config):
            return None
        version = config[FsdpOptions].fsdp_version
        return DistributedPlan(
            name="fsdp2",
            title="FSDP" if version == 2 else "FSDP 1",
            parallel="smalti_fsdp2.sharded:Sharded",
            context=config[ContextOptions].context_parallel_size,
            shards=True,
        )

    @hookimpl
    def wrap_model(
        self, model: nn.Module, family: ModelFamily, blocks: list[Block], parallel: Parallel, weights: Weights
    ) -> nn.Module | None:
        from smalti_fsdp2.sharded import Sharded

        return parallel.wrap(model, family, blocks, weights) if isinstance(parallel, Sharded) else None


plugin = Fsdp()
