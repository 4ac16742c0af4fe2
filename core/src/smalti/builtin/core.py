"""The hooks of the core: options, checks, folders as storages, blocks, optimizers, checkpoints, reactions to GPU faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smalti.hookspecs import hookimpl
from smalti.types import Block, Checkpoint, CheckpointFormat, FaultAction, GpuFault, MetadataEntry, OptimizerEntry, StorageEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smalti.checkpoint import Loaded, Snapshot
    from smalti.config import Config, OptionGroup
    from smalti.errors import Problem
    from smalti.models import ModelFamily
    from smalti.parallel import Communicator, Parallel

OPTIMIZERS = (OptimizerEntry(name="adamw", title="AdamW", state_bytes=8, factory="smalti.training.optim.optimizers:AdamW"),)


class Core:
    """The defaults of the core. They come after all other plugins."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti.config import GROUPS

        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti.builtin.checks import CHECKS

        return config.run_checks(*CHECKS)

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        return list(OPTIMIZERS)

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        from smalti.data import BUILT_IN_STORAGES

        return list(BUILT_IN_STORAGES)

    @hookimpl
    def register_metadata_backends(self) -> list[MetadataEntry]:
        from smalti.data import BUILT_IN_METADATA

        return list(BUILT_IN_METADATA)

    @hookimpl
    def register_checkpoint_formats(self) -> list[CheckpointFormat]:
        factory = "smalti.checkpoint:OwnCheckpoint"
        return [CheckpointFormat(name="smalti", title="smalti's own", marks=("manifest.json",), factory=factory)]

    @hookimpl
    def build_optimizer(
        self, groups: list[dict[str, object]], config: Config, registry: list[OptimizerEntry]
    ) -> torch.optim.Optimizer:
        from smalti.training import build_registered

        return build_registered(groups, config, registry)

    @hookimpl
    def detect_blocks(self, model: nn.Module, family: ModelFamily) -> list[Block]:
        from smalti.models import find_blocks

        return find_blocks(model, family.block_classes())

    @hookimpl
    def save_checkpoint(self, state: Snapshot, target: Path, parallel: Communicator) -> Checkpoint:
        from smalti.checkpoint import save

        return save(target, state, parallel)

    @hookimpl
    def load_checkpoint(self, source: Path, state: Snapshot, parallel: Parallel) -> Loaded:
        from smalti.checkpoint import load

        return load(source, state, parallel, verified=True)

    @hookimpl
    def on_gpu_fault(self, fault: GpuFault) -> FaultAction:
        """After an error of the CUDA runtime the process cannot read device memory any more, so there is nothing to save."""
        if fault.kind == "cuda_error":
            return FaultAction.STOP_UNSAVED
        if fault.severity == "warning":
            return FaultAction.CONTINUE
        return FaultAction.STOP_SUSPECT if fault.memory else FaultAction.STOP_SAVED


plugin = Core()
