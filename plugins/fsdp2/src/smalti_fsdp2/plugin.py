"""What smalti asks of this package. Imports no torch until a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import (
    Block,
    CacheEntry,
    Checkpoint,
    CheckpointFormat,
    CommandCollector,
    DistributedPlan,
    Finding,
    Strategy,
    World,
    hookimpl,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from smalti import Config, OptionGroup, Problem
    from smalti.checkpoint import Snapshot
    from smalti.models import ModelFamily, Weights
    from smalti.parallel import Communicator, Parallel

FORMATS = (
    CheckpointFormat(
        name="dcp",
        title="torch.distributed.checkpoint",
        marks=(".metadata",),
        factory="smalti_fsdp2.conversion:open_dcp",
    ),
    CheckpointFormat(
        name="accelerate-fsdp",
        title="Accelerate's save_state under FSDP",
        marks=("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp.bin"),
        factory="smalti_fsdp2.conversion:open_accelerate",
    ),
)

_DEPRECATED = "FSDP 1 is deprecated; --fsdp_version=2 reads the same options and checkpoints"


class Fsdp:
    """Claims every run that asks for FSDP, or for context parallelism."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_fsdp2.accelerate_import import GROUPS

        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_fsdp2.checks import problems

        return problems(config)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Find the repeated blocks of a model that FSDP should wrap."
        commands.add_deferred("smalti_fsdp2.commands:detect_blocks", summary)

    @hookimpl
    def register_caches(self) -> list[CacheEntry]:
        return [CacheEntry(name="fsdp-blocks", title="blocks of models", factory="smalti_fsdp2.detection:block_cache")]

    @hookimpl
    def configure_distributed(self, config: Config) -> DistributedPlan | None:
        from smalti_fsdp2.accelerate_export import fragment
        from smalti_fsdp2.checks import has_unseen_classes
        from smalti_fsdp2.options import ContextOptions, FsdpOptions, enabled, splits_context

        if not enabled(config):
            return None
        version = config[FsdpOptions].fsdp_version
        return DistributedPlan(
            name="fsdp2",
            accelerate=fragment(config),
            title="FSDP" if version == 2 else "FSDP 1",
            parallel="smalti_fsdp2.sharded:Fsdp2Parallel" if version == 2 else "smalti_fsdp2.fsdp1:Fsdp1Parallel",
            context=config[ContextOptions].context_parallel_size,
            splits_heads=config[ContextOptions].context_parallel_comm_strategy == "alltoall",
            shards=True,
            flattens_parameters=version == 1,
            notices=() if version == 2 else (_DEPRECATED,),
            check_model="smalti_fsdp2.checks:check_model" if has_unseen_classes(config) or splits_context(config) else "",
        )

    @hookimpl
    def propose_strategies(self, config: Config, world: World) -> list[Strategy]:
        from smalti_fsdp2.proposals import proposals

        return proposals(config, world)

    @hookimpl
    def detect_blocks(self, model: nn.Module, config: Config) -> list[Block] | None:
        from smalti_fsdp2.options import named_classes

        if not (names := named_classes(config)):
            return None
        from smalti_fsdp2.blocks import blocks_named

        return blocks_named(model, names)

    @hookimpl
    def wrap_model(
        self, model: nn.Module, family: ModelFamily, blocks: list[Block], parallel: Parallel, weights: Weights
    ) -> nn.Module | None:
        from smalti_fsdp2.fsdp1 import Fsdp1Parallel
        from smalti_fsdp2.sharded import Fsdp2Parallel

        if isinstance(parallel, Fsdp2Parallel):
            parallel.share_tokens(model, family)
        return parallel.wrap(model, blocks, weights) if isinstance(parallel, Fsdp2Parallel | Fsdp1Parallel) else None

    @hookimpl
    def save_checkpoint(self, state: Snapshot, target: Path, parallel: Communicator, config: Config) -> Checkpoint | None:
        """With a copy of the weights for other tools, if that is asked for; else as the core does."""
        from smalti_fsdp2.options import FsdpOptions

        if config[FsdpOptions].fsdp_state_dict_type != "FULL_STATE_DICT":
            return None
        from smalti.checkpoint import save

        return save(target, state, parallel, full_weights=True)

    @hookimpl
    def diagnose(self, config: Config | None) -> list[Finding]:
        """Whether this node can split tokens, for a run that does."""
        from smalti_fsdp2.checks import context_parallel_problem
        from smalti_fsdp2.options import splits_context

        reason = context_parallel_problem(config) if config is not None and splits_context(config) else None
        fix = "train on a node with CUDA devices, or --context_parallel_size=1"
        return [] if reason is None else [Finding(check="context parallelism", level="error", message=reason, fix=fix)]

    @hookimpl
    def register_checkpoint_formats(self) -> list[CheckpointFormat]:
        return list(FORMATS)


plugin = Fsdp()
