"""What smalti asks of the updates of weights, with whichever strategy. Imports no torch until a run is built.

Beside the plugin of streaming, which is a strategy and so not asked in a run of another one. By its name it is called before
the strategies; `build_optimizer` finds out where it was not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import Block, OptimizerEntry, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smalti import Config, OptionGroup, Problem
    from smalti.parallel import Parallel


class Updates:
    """Gives the model its type before it has weights, and the optimizer its steps."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti import OptionGroup
        from smalti_memory.updates.options import UpdateOptions

        return [OptionGroup(name="updates", title="Updates of weights", options=UpdateOptions)]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_memory.updates.checks import problems

        return problems(config)

    @hookimpl
    def notices_before_launch(self, config: Config) -> list[str]:
        from smalti_memory.updates.options import UpdateOptions

        if config[UpdateOptions].weights_dtype != "bf16":
            return []
        return ["weights are kept in bf16: first weights of a higher precision are rounded to it once"]

    @hookimpl
    def wrap_model(self, model: nn.Module, blocks: list[Block], parallel: Parallel) -> nn.Module | None:
        """None, as the strategy wraps the model; what is done here comes before its weights."""
        from smalti import Config
        from smalti_memory.updates.options import in_pieces

        config = getattr(parallel, "config", None)
        if isinstance(config, Config) and in_pieces(config):
            from smalti_memory.updates.building import prepare

            prepare(model, blocks, parallel, config)
        return None

    @hookimpl
    def build_optimizer(
        self, groups: list[dict[str, object]], config: Config, registry: list[OptimizerEntry]
    ) -> torch.optim.Optimizer | None:
        from smalti_memory.updates.options import in_pieces

        if not in_pieces(config):
            return None
        from smalti_memory.updates.building import build

        return build(groups, config, registry)


plugin = Updates()
"""The plugin of the entry point."""
