"""The hooks of the core: options, checks, folders as storages, blocks, optimizers, checkpoints, reactions to GPU faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.config import (
    GROUPS,
    ONLY_ON_CUDA,
    DataOptions,
    LaunchOptions,
    ModelOptions,
    OptimizerOptions,
    OptionGroup,
    RunOptions,
    TrainingOptions,
    cuda_graph_problem,
    launch_problems,
    package_of_scheme,
    warm_up_problem,
)
from smalti.data import BUILT_IN_METADATA, BUILT_IN_STORAGES
from smalti.errors import Problem
from smalti.hookspecs import hookimpl
from smalti.types import Block, Checkpoint, CheckpointFormat, FaultAction, GpuFault, MetadataEntry, OptimizerEntry, StorageEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smalti.checkpoint import Loaded, Snapshot
    from smalti.config import Config
    from smalti.models import ModelFamily
    from smalti.parallel import Communicator, Parallel

OPTIMIZERS = (
    OptimizerEntry(name="adamw", title="AdamW", state_bytes=8, factory="smalti.training.optim.optimizers:adamw"),
    OptimizerEntry(
        name="adafactor",
        title="Adafactor",
        state_bytes=0.1,
        factory="smalti.training.optim.optimizers:FixedRateAdafactor",
        accepts=("weight_decay",),
        shards=False,
        flat=False,
    ),
    OptimizerEntry(
        name="adafactor_scaled",
        title="Adafactor, learning rate scaled by the size of each weight",
        state_bytes=0.1,
        factory="torch.optim:Adafactor",
        accepts=("weight_decay",),
        shards=False,
        flat=False,
    ),
    OptimizerEntry(
        name="muon",
        title="Muon for matrices, AdamW for the rest",
        state_bytes=4.1,
        factory="smalti.training.optim.optimizers:muon",
        flat=False,
    ),
    OptimizerEntry(
        name="adagrad",
        title="Adagrad",
        state_bytes=4,
        factory="smalti.training.optim.optimizers:adagrad",
        accepts=("eps", "weight_decay"),
    ),
    OptimizerEntry(
        name="sgd",
        title="SGD with momentum 0.9",
        state_bytes=4,
        factory="smalti.training.optim.optimizers:sgd",
        accepts=("weight_decay",),
    ),
)


class Core:
    """The defaults of the core. They come after all other plugins."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        return config.run_checks(*CHECKS)

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        return list(OPTIMIZERS)

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        return list(BUILT_IN_STORAGES)

    @hookimpl
    def register_metadata_backends(self) -> list[MetadataEntry]:
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


def _family(config: Config) -> Iterator[Problem]:
    if config[ModelOptions].model_family is None:
        yield Problem(message="no model family given", fix="--model_family=NAME; `smalti plugins` lists them")


def _directory(config: Config) -> Iterator[Problem]:
    folder, where = config[RunOptions].output_dir, config.source("output_dir")
    if folder is None:
        yield Problem(message="no run directory given", fix="--output_dir=FOLDER")
    elif (url := re.match(r"([a-z][a-z0-9+.-]+):/", str(folder))) is not None:  # a path has one slash left of two
        package = package_of_scheme(url[1])
        message = f"output_dir is a URL of the scheme {url[1]!r}"
        yield package.problem(message, where) if package else Problem(message=message, where=where, fix="--output_dir=FOLDER")


def _datasets(config: Config) -> Iterator[Problem]:
    data = config[DataOptions]
    given = [name for name in ("data_backend_config", "datasets", "instance_data_dir") if getattr(data, name)]
    if not given:
        fix = (
            "--instance_data_dir=FOLDER of images with captions, or --data_backend_config=FILE, or [[datasets]] in a TOML file"
        )
        yield Problem(message="no dataset given", fix=fix)
    elif len(given) > 1:
        yield Problem(message=f"{' and '.join(given)} both name datasets", fix="keep one of them")


def _length(config: Config) -> Iterator[Problem]:
    if config[RunOptions].max_train_steps is None and config[RunOptions].num_train_epochs is None:
        yield Problem(message="no training length given", fix="--max_train_steps=N or --num_train_epochs=N")


def _warm_up(config: Config) -> Iterator[Problem]:
    steps = config[RunOptions].max_train_steps
    if steps is not None and (problem := warm_up_problem(config[OptimizerOptions], steps)) is not None:
        yield problem


def _kernel(config: Config) -> Iterator[Problem]:
    if config[LaunchOptions].use_cpu and (kernel := config[TrainingOptions].sdpa_backend) in ONLY_ON_CUDA:
        message = f"the attention kernel '{kernel}' does not run on the CPU"
        yield Problem(message=message, where="sdpa_backend", fix="--sdpa_backend=auto, flash or math")


def _graphs(config: Config) -> Iterator[Problem]:
    """Recomputed blocks free other tensors than at the recording of the graph (pytorch/pytorch#154306)."""
    reason = "with --gradient_checkpointing: blocks run a second time in the backward pass"
    problem = cuda_graph_problem(config[LaunchOptions], reason)
    if config[ModelOptions].gradient_checkpointing and problem is not None:
        yield problem


def _launch(config: Config) -> list[Problem]:
    return launch_problems(config[LaunchOptions])


CHECKS = (_family, _directory, _datasets, _length, _warm_up, _kernel, _graphs, _launch)


plugin = Core()
