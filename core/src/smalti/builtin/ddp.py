"""The built-in strategy: one process, or a replica of the model on each rank with averaged gradients (DDP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti.config import LaunchOptions
from smalti.hookspecs import hookimpl
from smalti.types import Block, DistributedPlan

if TYPE_CHECKING:
    from torch import nn

    from smalti.config import Config
    from smalti.models import Weights
    from smalti.parallel import Parallel


class Ddp:
    """Claims every run that no other strategy claims."""

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan:
        title = "DDP" if config[LaunchOptions].num_processes > 1 else "single process"
        return DistributedPlan(name="ddp", title=title, parallel="smalti.builtin.ddp_parallel:DdpParallel", fallback=True)

    @hookimpl
    def wrap_model(self, model: nn.Module, blocks: list[Block], parallel: Parallel, weights: Weights) -> nn.Module | None:
        from smalti.builtin.ddp_parallel import DdpParallel

        return parallel.wrap(model, blocks, weights) if isinstance(parallel, DdpParallel) else None


plugin = Ddp()
