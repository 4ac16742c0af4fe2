"""Turning an accelerator's failure inside the loop into a question to the plugins: go on, save, or stop?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from smalti.data.loader import Batch
from smalti.errors import GpuFaultError
from smalti.observers import consult, warn
from smalti.outofmemory import is_out_of_memory
from smalti.run import Run
from smalti.settings import RunOptions
from smalti.types import FaultAction, GpuFault, StopReason, World

_DEFAULT = "core"
"""The plugin whose answer counts only where no other has one."""


def is_fault(error: BaseException) -> bool:
    """Whether an exception tells of a failing accelerator.

    Errors of the device runtime (an illegal address, a lost device, an uncorrectable ECC error) come as AcceleratorError.
    Running out of memory is no fault of the device, and a failed collective is none of this rank's.
    """
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def fault_of(error: BaseException, world: World) -> GpuFault:
    """The fault that such an exception stands for."""
    return GpuFault(kind="cuda_error", message=str(error).partition("\n")[0], device=world.device, rank=world.rank)


@contextmanager
def faults_answered(run: Run, batch: Batch) -> Iterator[None]:
    """Around what is done with a batch: a fault of the accelerator is followed by what the plugins answer (`FaultAction`).

    In a single process the loop goes on to its boundary, whether it stops there or not. One of several ranks cannot reach the
    boundary: it leaves with the fault as the reason, and one of the others saves (`smalti.rescue`).
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if not is_fault(error):
            raise
        fault = fault_of(error, run.world)
        action = answer(run, fault)
        if run.world.size > 1:
            raise _left_by(fault) from error
        run.parallel.discard()
        if action > FaultAction.CHECKPOINT:
            return
        if run.state.position <= batch.position:
            run.leave_out(batch)
        then = "this step is left out" + (", saving" if action is FaultAction.CHECKPOINT else "")
        warn(run.plugins, run.state, f"{_told(fault)}; {then}, going on", error)


@contextmanager
def faults_end(run: Run) -> Iterator[None]:
    """Around the loop: a fault that is met between two steps, as in a save, ends the run as a fault."""
    try:
        yield
    except torch.AcceleratorError as error:
        if is_fault(error):
            fault = fault_of(error, run.world)
            answer(run, fault)
            raise _left_by(fault) from error
        raise


def answer(run: Run, fault: GpuFault) -> FaultAction:
    """What the plugins want done, the worst answer first; it is put to the state as a request, which the loop obeys."""
    state = run.state
    answers = consult(run.plugins, "on_gpu_fault", state, fault=fault)
    others = [action for name, action in answers.items() if name != _DEFAULT] or list(answers.values())
    action = max((cast(FaultAction, each) for each in others), default=FaultAction.STOP_UNSAVED)
    message = _told(fault)
    if not run.boundary.whole:
        action, message = FaultAction.STOP_UNSAVED, f"{message}, while the weights were being changed"
    elif action < FaultAction.STOP_SAVED and state.skipped + 1 >= run.config[RunOptions].max_skipped_steps:
        action, message = FaultAction.STOP_UNSAVED, f"{message}; {state.skipped + 1} steps in a row were left out"
    if action is FaultAction.CHECKPOINT:
        state.request_save()
    elif action is FaultAction.STOP_SAVED:
        state.request_stop(StopReason.FAULT, message)
    elif action is FaultAction.STOP_UNSAVED:
        state.request_stop(StopReason.FAULT_UNSAVED, message)
    return action


def _told(fault: GpuFault) -> str:
    return f"{fault.kind} on {fault.device} of rank {fault.rank}: {fault.message}"


def _left_by(fault: GpuFault) -> GpuFaultError:
    return GpuFaultError(f"{fault.kind} on {fault.device}: {fault.message}")
