"""What smalti asks of this package. Imports no torch until a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import Block, DistributedPlan, Strategy, World, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from smalti import Config, OptionGroup, Problem
    from smalti.models import Weights
    from smalti.parallel import Parallel


class Memory:
    """Claims every run that asks for its frozen weights to be streamed, but for those that FSDP spreads over ranks."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti import OptionGroup
        from smalti_memory.options import MemoryOptions

        return [OptionGroup(name="memory", title="Memory", options=MemoryOptions)]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_memory.checks import problems

        return problems(config)

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        from smalti_memory.options import streams_base, under_fsdp

        if not streams_base(config) or under_fsdp(config):
            return None
        return DistributedPlan(name="memory", title="streaming of the base", parallel="smalti_memory.parallel:StreamedParallel")

    @hookimpl
    def propose_strategies(self, config: Config, world: World) -> list[Strategy]:
        from smalti_memory.proposals import proposals

        return proposals(config, world)

    @hookimpl
    def wrap_model(self, model: nn.Module, blocks: list[Block], parallel: Parallel, weights: Weights) -> nn.Module | None:
        from smalti_memory.parallel import StreamedParallel

        return parallel.wrap(model, blocks, weights) if isinstance(parallel, StreamedParallel) else None


plugin = Memory()
"""The plugin of the entry point."""
