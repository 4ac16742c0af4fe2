"""Turning an accelerator's failure inside the loop into a question to the plugins: go on, save, or stop?"""

from __future__ import annotations

from typing import cast

import torch

from smalti.plugins import Plugins
from smalti.types import FaultAction, GpuFault, RunState, StopReason, World


def fault_of(error: BaseException, world: World) -> GpuFault | None:
    """The fault that an exception stands for, or None if it is something else.

    Errors of the device runtime (an illegal address, a lost device, an uncorrectable ECC error) come as AcceleratorError.
    Running out of memory is no fault of the device, and a failed collective is none of this rank's.
    """
    if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
        return GpuFault(kind="cuda_error", message=str(error).partition("\n")[0], device=world.device, rank=world.rank)
    return None


def answer(fault: GpuFault, plugins: Plugins, state: RunState) -> FaultAction:
    """What the plugins want done, the worst answer first; it is put to `state` as a request that the ranks then agree on."""
    answers = plugins.answers("on_gpu_fault", fault=fault, state=state)
    action = max((FaultAction(cast(int, each)) for _, each in answers), default=FaultAction.STOP_UNSAVED)
    message = f"{fault.kind} on {fault.device} of rank {fault.rank}: {fault.message}"
    if action is FaultAction.CHECKPOINT:
        state.request_save()
    elif action is FaultAction.STOP_SAVED:
        state.request_stop(StopReason.FAULT, message)
    elif action is FaultAction.STOP_UNSAVED:
        state.request_stop(StopReason.FAULT_UNSAVED, message)
    return action
