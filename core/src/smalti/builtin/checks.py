"""What the core checks of a configuration, beyond what the type of each option says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from smalti.config import (
    ONLY_ON_CUDA,
    Config,
    DataOptions,
    LaunchOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    TrainingOptions,
    cuda_graph_problem,
    launch_problems,
    package_of,
    warm_up_problem,
)
from smalti.errors import Problem
from smalti.system import FOLDER_VARIABLE


def _family(config: Config) -> Iterator[Problem]:
    if config[ModelOptions].model_family is None:
        yield Problem(message="no model family given", fix="--model_family=NAME; `smalti plugins` lists them")


def _directory(config: Config) -> Iterator[Problem]:
    folder, where = config[RunOptions].output_dir, config.source("output_dir")
    if folder is None:
        yield Problem(message="no run directory given", fix="--output_dir=FOLDER")
    elif (url := re.match(r"([a-z][a-z0-9+.-]+):/", str(folder))) is not None:  # a path has one slash left of two
        package = package_of("schemes", url[1])
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


def _launcher(config: Config) -> Iterator[Problem]:
    """Another launcher around `smalti train`: each of its processes would be a run of its own, in the same directory."""
    found = None if FOLDER_VARIABLE in os.environ else rank_launcher(os.environ)  # set in smalti's own ranks
    if found is not None:
        launcher, ranks = found
        message = f"{launcher} has started this process as a rank, and smalti starts its ranks itself"
        nodes = ", once on each node" if config[LaunchOptions].num_machines > 1 else ""
        yield Problem(message=message, fix=f"without {launcher}{nodes}: smalti train --num_processes={ranks}")


def rank_launcher(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The launcher that has started this process as one of several ranks, and how many it starts ("N" if it does not say).

    None where one process was started on the node, as by SLURM, Kubernetes or `torchrun --nproc-per-node=1`. With
    `accelerate launch` one process counts too, as its settings of precision and of the kinds of ranks have no effect.
    """
    ranks = environment.get("WORLD_SIZE", "N")
    if "ACCELERATE_DYNAMO_MODE" in environment and "ACCELERATE_MIXED_PRECISION" in environment:
        return "accelerate launch", ranks
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")  # the second is DeepSpeed's
    if "LOCAL_RANK" not in environment or local in (None, "", "1"):
        return None
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "another launcher", ranks


CHECKS = (_family, _directory, _datasets, _length, _warm_up, _kernel, _graphs, _launch, _launcher)
