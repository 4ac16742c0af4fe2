"""The built-in strategy: one process, or a replica of the model on each rank with averaged gradients (DDP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from smalti.hookspecs import hookimpl
from smalti.types import Block, Communication, DistributedPlan, Recompute, Strategy, World

if TYPE_CHECKING:
    from torch import nn

    from smalti.config import Config
    from smalti.models import Weights
    from smalti.parallel import Parallel


class Ddp:
    """Claims every run that no other strategy claims."""

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan:
        from smalti.config import LaunchOptions

        title = "DDP" if config[LaunchOptions].num_processes > 1 else "single process"
        return DistributedPlan(name="ddp", title=title, parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)

    @hookimpl
    def propose_strategies(self, world: World) -> list[Strategy]:
        """One process, or DDP. DDP keeps gradients in its buckets between steps; a ring sends each of them almost twice."""
        recompute: Mapping[Recompute, Mapping[str, object]] = {
            "none": {"gradient_checkpointing": False},
            "full": {"gradient_checkpointing": True},
        }
        if world.size == 1:
            return [Strategy(name="single", title="one process", options={}, recompute=recompute)]
        sent = 2 * 4 * (world.size - 1) / world.size
        several = world.size > world.local_size
        reduction = Communication(
            collective="all-reduce",
            bytes_per_parameter=sent,
            ranks=world.size,
            of="trained",
            times="step",
            between_nodes=several,
        )
        return [
            Strategy(
                name="ddp",
                title="DDP",
                options={},
                recompute=recompute,
                keeps_gradients=True,  # as views of its buckets
                communication=(reduction,),
            )
        ]

    @hookimpl
    def wrap_model(self, model: nn.Module, blocks: list[Block], parallel: Parallel, weights: Weights) -> nn.Module | None:
        from smalti.training import DdpParallel

        return parallel.wrap(model, blocks, weights) if isinstance(parallel, DdpParallel) else None


plugin = Ddp()
