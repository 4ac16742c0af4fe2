"""Bringing up DeepSpeed inside a process group that is there already: without noise, and without compiling what no run uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from smalti import World
from smalti.models import is_dry_run


def start_deepspeed(world: World) -> None:
    """Import DeepSpeed and let it find the process group that this rank has joined.

    The log is kept down to warnings, like that of any library.
    """
    kind = torch.device(world.device).type
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # also where nobody launched this process
    if kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _without_info():
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On CPUs it would compile a reduction in shared memory for a minute, which inference alone uses.
    with replaced(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None):
        backend = "gloo" if kind == "cpu" else torch.distributed.get_default_backend_for_device(kind)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, dist_init_required=False)
    # Every ZeRO asks whether its optimizer is a Muon; compiling Muon's kernels for that loads a whole compiler.
    with replaced(import_module("deepspeed.runtime.compiler"), "compile", lambda: lambda function: function):
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    if is_dry_run():
        _trust_other_ranks()
        _compile_nothing()


def _trust_other_ranks() -> None:
    """ZeRO 3 compares lists with what other ranks send. In a dry run tensors have no values, and the others are not there."""
    for name in ("stage3", "partition_parameters", "partitioned_param_coordinator"):
        module: Any = import_module(f"deepspeed.runtime.zero.{name}")
        module.assert_ints_same_as_other_ranks = lambda ints: None


def _compile_nothing() -> None:
    """DeepSpeed's compiled optimizers read memory that tensors do not have in a dry run. They allocate nothing."""
    builder: Any = import_module("deepspeed.ops.op_builder.builder")
    builder.OpBuilder.load = lambda self, verbose=True: _NoKernels()


class _NoKernels:
    """In place of a compiled module: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def stop_deepspeed() -> None:
    """Let go of the process group, and take back what it has replaced for the whole process. A later run may start it again."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
    from deepspeed.utils import groups

    torch.nn.functional.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", torch.nn.functional.linear)
    import_module("deepspeed.comm.comm").cdb = None  # type: ignore[attr-defined]
    groups._WORLD_GROUP = None


@contextmanager
def _without_info() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """For all of this process, while the block lasts."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)
