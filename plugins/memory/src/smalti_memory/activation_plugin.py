"""The plugin that keeps activations in host memory. Imports no torch until a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from smalti import Config, OptionGroup, Problem
    from smalti.parallel import Parallel


class Activations:
    """No strategy: it works beside each of them, within the forward pass of the model that they spread over the ranks."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti import OptionGroup
        from smalti_memory.options import ActivationOptions

        return [OptionGroup(name="activations", title="Activations", options=ActivationOptions)]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_memory.checks import activation_problems

        return activation_problems(config)

    @hookimpl(tryfirst=True)
    def wrap_model(self, model: nn.Module, parallel: Parallel) -> None:
        """Before the strategy, which returns the model."""
        from smalti.parallel import ProcessGroupParallel
        from smalti_memory.options import ActivationOptions

        assert isinstance(parallel, ProcessGroupParallel)
        if parallel.config[ActivationOptions].offload_activations:
            from smalti_memory.activations import ActivationOffload

            ActivationOffload(parallel.world.device).attach(model)


plugin = Activations()
"""The plugin of the entry point."""
