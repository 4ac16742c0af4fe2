"""Checks of a sharded run before the launch. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import Config, ConfigError, Problem
from smalti.config import LaunchOptions, ModelOptions, TrainingOptions, cuda_graph_problem
from smalti.parallel import accelerator_kind, in_bf16
from smalti_fsdp2.options import (
    CONTEXT_ON_CPU,
    ContextOptions,
    FsdpOptions,
    context_without_fsdp2,
    enabled,
    named_classes,
    splits_context,
)
from smalti_memory.options import streams_base

if TYPE_CHECKING:
    from torch import nn

_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/kfd")
"""What the drivers of CUDA devices make on Linux: NVIDIA's, under WSL, of Jetson devices, and AMD's."""


def problems(config: Config) -> list[Problem]:
    """All complaints at once."""
    if context_without_fsdp2(config):
        fix = "--fsdp_enable --fsdp_version=2, or --context_parallel_size=1"
        return [Problem(message="Context parallelism requires FSDP2.", where=config.source("context_parallel_size"), fix=fix)]
    if not enabled(config):
        return []
    return config.run_checks(_sizes, _classes, _recomputation, _graphs, _symmetric_memory, _streaming, _beyond_version1)


def context_parallel_problem(config: Config) -> str | None:
    """Why the ranks of this host cannot split tokens; None if they can, as far as that can be known without torch."""
    if os.environ.get(CONTEXT_ON_CPU):
        return None
    if config[LaunchOptions].use_cpu:
        return "context parallelism needs CUDA devices, and use_cpu is set"
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    built = version.read_text(encoding="utf-8") if version is not None and version.is_file() else ""
    if re.search(r"^(cuda|hip)\b.*=\s*['\"]", built, re.MULTILINE) is None:
        return "context parallelism needs CUDA devices, and the installed torch is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "context parallelism needs CUDA devices, and CUDA_VISIBLE_DEVICES hides those of this host"
    if sys.platform == "linux" and not any(Path(name).exists() for name in _DEVICES) and not shutil.which("nvidia-smi"):
        return "context parallelism needs CUDA devices, and this host has none"
    return None


def _sizes(config: Config) -> list[Problem]:
    ranks = config[LaunchOptions].num_processes
    found = []
    context = config[ContextOptions].context_parallel_size
    if context > 1 and config[LaunchOptions].use_cpu and not os.environ.get(CONTEXT_ON_CPU):
        fix = "leave --use_cpu out, or --context_parallel_size=1"
        found.append(Problem(message="context parallelism needs CUDA devices", where=config.source("use_cpu"), fix=fix))
    if ranks % context:
        fix = f"--num_processes={context * max(1, ranks // context)}, or a context_parallel_size that divides {ranks}"
        found.append(Problem(message=f"{ranks} ranks cannot be split into groups of context_parallel_size={context}", fix=fix))
    shard = config[FsdpOptions].fsdp_shard_size
    if shard is not None and ranks % shard:
        fix = f"--fsdp_shard_size={ranks} to share one copy among all, or a number that divides {ranks}"
        found.append(Problem(message=f"{ranks} ranks cannot be split into groups of fsdp_shard_size={shard}", fix=fix))
    return found


def _recomputation(config: Config) -> list[Problem]:
    """Recomputation asked for twice, or in a way that does not go with groups inside blocks."""
    options = config[FsdpOptions]
    if not options.fsdp_activation_checkpointing:
        return []
    found = []
    if config[ModelOptions].gradient_checkpointing:
        fix = "keep one of --gradient_checkpointing and --fsdp_activation_checkpointing"
        found.append(Problem(message="activations would be recomputed twice", fix=fix))
    blocks_are_whole = options.fsdp_auto_wrap_policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    if options.fsdp_activation_checkpointing_mode == "selective" and not blocks_are_whole:
        message = (
            f"selective recomputation cannot gather groups inside of blocks, as {options.fsdp_auto_wrap_policy} may make them"
        )
        fix = "--fsdp_activation_checkpointing_mode=full, or --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"
        found.append(Problem(message=message, fix=fix))
    return found


def _graphs(config: Config) -> list[Problem]:
    """A graph reads parameters where they were when it was recorded."""
    problem = cuda_graph_problem(config[LaunchOptions], "with FSDP: parameters are gathered into other memory in every pass")
    return [] if problem is None else [problem]


def _symmetric_memory(config: Config) -> list[Problem]:
    """NCCL has it, and sends nothing from host memory."""
    if not config[FsdpOptions].fsdp_symmetric_memory or not config[LaunchOptions].use_cpu:
        return []
    message, fix = "fsdp_symmetric_memory needs NVIDIA GPUs, and use_cpu is set", "--no_fsdp_symmetric_memory, or --no_use_cpu"
    return [Problem(message=message, where=config.source("fsdp_symmetric_memory"), fix=fix)]


def _streaming(config: Config) -> list[Problem]:
    """Frozen shards in host memory, and options that would leave nothing of that."""
    if not streams_base(config):
        return []
    options, fix = config[FsdpOptions], "or --no_stream_base"
    found = (
        (
            options.fsdp_cpu_offload,
            "stream_base keeps shards of frozen weights in host memory, and fsdp_cpu_offload keeps all shards there",
            f"--no_fsdp_cpu_offload to have what trains on the device, {fix}",
        ),
        (
            not options.fsdp_reshard_after_forward,
            "stream_base would save nothing: without fsdp_reshard_after_forward the device keeps all blocks gathered",
            f"--fsdp_reshard_after_forward, {fix}",
        ),
        (
            options.fsdp_auto_wrap_policy == "NO_WRAP",
            "stream_base needs blocks that are gathered one by one, and fsdp_auto_wrap_policy=NO_WRAP gathers the whole model",
            f"--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP, {fix}",
        ),
    )
    where = config.source("stream_base")
    return [Problem(message=message, where=where, fix=each) for wrong, message, each in found if wrong]


def _classes(config: Config) -> list[Problem]:
    """Names of blocks that the model does not have, if it was looked at before: to build it here would take torch."""
    names = named_classes(config)
    if not names:
        return []
    from smalti_fsdp2.blocks import unknown_classes
    from smalti_fsdp2.detection import FLAG, detected

    known = detected(config)
    found = unknown_classes(names, known.structure.modules) if known is not None else []
    return [replace(problem, where=config.source(FLAG)) for problem in found]


def has_unseen_classes(config: Config) -> bool:
    """Whether blocks were named of a model that nobody has looked at yet: then `check_model` is the one to ask."""
    if not named_classes(config):
        return False
    from smalti_fsdp2.detection import detected

    return detected(config) is None


def check_model(config: Config, model: nn.Module) -> None:
    """Raises UserError if the user named blocks that the model does not have, or if this host cannot split its tokens.

    A launch that the Accelerate YAML plans for CUDA devices is checked where it starts, not by a dry run elsewhere.
    """
    from smalti_fsdp2.blocks import blocks_named

    if named := named_classes(config):
        blocks_named(model, named)
    reported = config[LaunchOptions].use_cpu  # by `_sizes`
    elsewhere = config.accelerate.get("distributed_type") in ("FSDP", "MULTI_GPU")
    if splits_context(config) and not reported and not elsewhere and (reason := _no_cuda(config)):
        fix = "start it where there are CUDA devices (nvidia-smi lists them), or --context_parallel_size=1"
        where, option = config.source("context_parallel_size"), "context_parallel_size"
        raise ConfigError([Problem(message=reason, where=where, fix=fix, option=option)])


def _no_cuda(config: Config) -> str | None:
    """Why the ranks of this host cannot split tokens, also as torch sees it."""
    if os.environ.get(CONTEXT_ON_CPU) or accelerator_kind(config) == "cuda":
        return None
    return context_parallel_problem(config) or "context parallelism needs CUDA devices, and torch can use none of this host"


def _beyond_version1(config: Config) -> list[Problem]:
    """What version 2 does and version 1 does not."""
    options, training, launch = config[FsdpOptions], config[TrainingOptions], config[LaunchOptions]
    if options.fsdp_version != 1:
        return []
    gathered_in_bf16 = options.fsdp_param_dtype == "bf16" or (options.fsdp_param_dtype == "auto" and in_bf16(config))
    sharing = options.fsdp_shard_size or launch.num_processes // launch.num_machines
    found = (
        ("use_ema", training.use_ema, "FSDP 1 leaves flat slices of parameters, whose average no other strategy could read"),
        (
            "fsdp_shard_size",
            sharing == 1 < launch.num_processes,
            "FSDP 1 does not average gradients over copies that are not sharded",
        ),
        ("model_type", config[ModelOptions].model_type == "lora", "FSDP 1 would save the frozen model with every adapter"),
        ("fsdp_forward_prefetch", options.fsdp_forward_prefetch > 1, "FSDP 1 gathers no more than one block ahead"),
        ("fsdp_backward_prefetch", options.fsdp_backward_prefetch > 1, "FSDP 1 gathers no more than one block ahead"),
        ("fsdp_bf16_blocks", options.fsdp_bf16_blocks, "FSDP 1 computes under autocast"),
        ("fsdp_symmetric_memory", options.fsdp_symmetric_memory, "FSDP 1 sends from memory of its own"),
        ("fsdp_output_dtype", options.fsdp_output_dtype != "auto", "FSDP 1 leaves the type of the output"),
        (
            "gradient_accumulation_steps",
            training.gradient_accumulation_steps > 1 and options.fsdp_cpu_offload and gathered_in_bf16,
            "FSDP 1 with fsdp_cpu_offload adds up the gradients of micro-batches in bf16",
        ),
    )
    fix = "--fsdp_version=2, which reads the same options and checkpoints"
    return [Problem(message=message, where=config.source(name), fix=fix) for name, wrong, message in found if wrong]
