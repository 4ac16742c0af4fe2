"""Checks of a run under DeepSpeed before the launch. Imports no torch, no DeepSpeed.

The JSON itself is checked when options are read, in `derived_options`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ctypes.util import find_library

from smalti import Config, Problem
from smalti.config import DataOptions, LaunchOptions, OptimizerOptions, TrainingOptions, cuda_graph_problem
from smalti.parallel import is_rocm
from smalti_deepspeed.config import given, offload_folders, zero_settings
from smalti_deepspeed.optimizers import ENTRIES, deepspeed_name, misplaced, nearest, needs_accelerator, refusal
from smalti_deepspeed.options import enabled
from smalti_deepspeed.parsing import is_open, place, section


def problems(config: Config) -> list[Problem]:
    """All complaints at once."""
    if not enabled(config):
        return list(_optimizer_without(config))
    if (platform := platform_problem()) is not None:
        return [platform]
    return config.run_checks(_context, _batch, _clipping, _optimizer, _graphs, _folders)


def platform_problem() -> Problem | None:
    """Why DeepSpeed does not run here; None if it does."""
    fix = "leave deepspeed_config out, or --deepspeed_config=none"
    if sys.platform == "darwin":
        return Problem(message="DeepSpeed does not run on macOS, with or without MPS", where="deepspeed_config", fix=fix)
    if sys.platform == "win32":
        return Problem(message="smalti does not run DeepSpeed on Windows", where="deepspeed_config", fix=fix)
    if is_rocm():
        return Problem(
            message="smalti does not run DeepSpeed on ROCm", where="deepspeed_config", fix=f"{fix}; or --fsdp_enable"
        )
    return None


def _context(config: Config) -> Iterator[Problem]:
    """The option is another plugin's, which may not be there."""
    if "context_parallel_size" in config.schema.options and config.value("context_parallel_size") != 1:
        message = "Context parallelism requires FSDP2, and deepspeed_config asks for DeepSpeed."
        fix = "--context_parallel_size=1, or --deepspeed_config=none"
        yield Problem(message=message, where=config.source("context_parallel_size"), fix=fix)


def _batch(config: Config) -> Iterator[Problem]:
    """DeepSpeed's `train_batch_size` is that of all ranks, smalti's that of one: only the first can contradict the rest."""
    wanted = given(config).get("train_batch_size")
    ranks = config[LaunchOptions].num_processes
    micro, steps = config[DataOptions].train_batch_size, config[TrainingOptions].gradient_accumulation_steps
    whole = micro * steps * ranks
    if is_open(wanted) or wanted == whole:
        return
    parts = f"train_batch_size={micro} x num_processes={ranks} x gradient_accumulation_steps={steps}"
    message = f"train_batch_size is {wanted!r} in deepspeed_config, and {parts} make {whole}"
    yield Problem(message=message, where=config.source("deepspeed_config"), fix='"train_batch_size": "auto", or other numbers')


def _clipping(config: Config) -> Iterator[Problem]:
    """`gradient_clipping`, in the JSON or in an Accelerate YAML, is a norm."""
    where = config.source("max_grad_norm")
    if (
        config[TrainingOptions].grad_clip_method == "value"
        and config[TrainingOptions].max_grad_norm
        and "gradient_clipping" in where
    ):
        message = "gradient_clipping is a global norm, and grad_clip_method=value asks for a limit of each element"
        yield Problem(message=message, where=where, fix="leave gradient_clipping out, or --grad_clip_method=norm")


def _optimizer(config: Config) -> Iterator[Problem]:
    chosen = config[OptimizerOptions].optimizer
    name, where, zero = deepspeed_name(chosen), config.source("optimizer"), zero_settings(config)
    offloaded = section(zero, "offload_optimizer").get("device") in ("cpu", "nvme")
    if name is not None and (refused := refusal(name)) is not None:
        yield Problem(message=refused[0], where=where, fix=f"--optimizer={nearest(name)}")
    elif (wrong := misplaced(name, zero.get("stage"), offloaded=offloaded, flag=True)) is not None:
        yield Problem(message=wrong[0] if name else f"smalti's {chosen}: {wrong[0]}", where=where, fix=wrong[1])
    elif config[LaunchOptions].use_cpu and (reason := needs_accelerator(name, offloaded=offloaded)):
        yield Problem(message=reason, where=where, fix="--optimizer=adamw; or --no_use_cpu where there is one")


def _optimizer_without(config: Config) -> Iterator[Problem]:
    chosen = config[OptimizerOptions].optimizer.strip().lower().replace("-", "_")
    if any(entry.name == chosen for entry in ENTRIES):
        fix = "--deepspeed_config=..., or another optimizer, such as adamw"
        yield Problem(message=f"{chosen} trains under DeepSpeed only", where=config.source("optimizer"), fix=fix)


def _graphs(config: Config) -> Iterator[Problem]:
    """A graph reads parameters where they were when it was recorded."""
    stage = zero_settings(config).get("stage")
    reason = "with stage 3 of ZeRO: parameters are gathered into other memory in every pass"
    problem = cuda_graph_problem(config[LaunchOptions], reason)
    if stage == 3 and problem is not None:
        yield problem


def has_libaio() -> bool:
    """Whether the loader or the C compiler finds the library with which DeepSpeed swaps to a drive."""
    try:
        return find_library("aio") is not None
    except FileNotFoundError:  # the compiler found it, and Python cuts its answer at a space in the path
        return True


def _folders(config: Config) -> Iterator[Problem]:
    """Folders that are there, or can be made in one that is; each node checks again when its ranks start."""
    document = {"zero_optimization": zero_settings(config)}
    for key in ("offload_param", "offload_optimizer"):
        offload = section(document, "zero_optimization", key)
        if offload.get("device") == "nvme" and is_open(offload.get("nvme_path")):
            where = f"zero_optimization.{key}.nvme_path in deepspeed_config"
            yield Problem(message="the folder on the NVMe drive is not given", where=where, fix="--offload_param_path=FOLDER")
    folders = offload_folders(document)
    if folders and not has_libaio():
        fix = "install libaio with its headers (libaio-dev, libaio-devel), or offload to cpu"
        yield Problem(message="DeepSpeed swaps to a drive with libaio, which is not here", where="deepspeed_config", fix=fix)
    written = section(given(config), "zero_optimization")
    in_json = {str(place(str(section(written, key).get("nvme_path")))) for key in ("offload_param", "offload_optimizer")}
    for name in folders:
        folder = place(name)
        base = folder if folder.exists() or folder.is_symlink() else folder.parent
        named = "as nvme_path, or leave that out for --offload_param_path" if name in in_json else "with --offload_param_path"
        fix = f"use a folder on a drive of this node {named}"
        if not base.is_dir():
            message = (
                f"{folder} is not a folder"
                if folder.exists() or folder.is_symlink()
                else f"there is no folder {folder}, and none around it to make it in"
            )
            yield Problem(message=message, where="deepspeed_config", fix=fix)
        elif not os.access(base, os.W_OK | os.X_OK):
            yield Problem(message=f"{base} cannot be written to", where="deepspeed_config", fix=fix)
