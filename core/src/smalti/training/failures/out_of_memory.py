"""Running out of memory on this rank becomes an error of its own, which a plugin may explain."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smalti.errors import ExitCode, UserError
from smalti.hookspecs import HookSpecs
from smalti.parallel import ALLOCATOR_VARIABLES
from smalti.plugins import Plugins, ask_each
from smalti.training.run import Run
from smalti.types import RankInfo, RunState

_NO_ROOM = re.compile(
    r"DefaultCPUAllocator: "
    r"|(CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    r"|Cuda failure( \d+)? 'out of memory'"  # NCCL's
    r"|CU[A-Z]+_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuSOLVER
)
_DRIVER = "CUDA driver error: "


class OutOfMemory(UserError):  # noqa: N818 - names what happened, as UserError says what it is
    """A device, or the host, has no room for what this rank wants to compute. No fault of the device."""

    exit_code = ExitCode.FAILED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_ROOM.search(str(error)) is not None


@contextmanager
def memory_explained(plugins: Plugins, state: RunState, info: RankInfo, run: Run | None = None) -> Iterator[None]:
    """An exception that says that memory ran out becomes an OutOfMemory, in the words of a plugin; else in torch's.

    `run` is None while it is built. A driver that cannot map memory as the allocator is configured to becomes a UserError: it
    shows with the first allocation.
    """
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        expandable = any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
        if run is None and not is_out_of_memory(error) and _DRIVER in str(error) and expandable:
            raise UserError(
                f"the driver of {info.world.device} refuses expandable segments of memory ({first})",
                fix=f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:False in the environment",
            ) from error
        if not is_out_of_memory(error):
            raise
        answers = ask_each(plugins, HookSpecs.explain_error, state, error=error, info=info, run=run)
        said = next(iter(answers.values()), UserError(f"out of memory: {first or type(error).__name__}"))
        raise OutOfMemory(said.message, fix=said.fix) from error
