"""Turning an accelerator's failure inside the loop into a question to the plugins: continue, save, or stop?

What is written of a fault is one line of JSON on standard error and a `health` event of its node.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from smalti.data import Batch
from smalti.errors import GpuFaultError
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, ask_each, notify_each, warn
from smalti.rundir import EventWriter, Ownership, RunDirectory
from smalti.training.failures.out_of_memory import is_out_of_memory
from smalti.training.run import MOST_SKIPPED_STEPS, Run
from smalti.types import FaultAction, GpuFault, RankInfo, RunState, StopReason, World

PREFIX = "smalti: fault "
"""What the line begins with; JSON follows."""
_log = logging.getLogger(__name__)


def record_fault(info: RankInfo, state: RunState, fault: GpuFault, action: FaultAction) -> None:
    """Write a fault and the action that was decided on. On the rank with the fault; never raises."""
    found = info.config.masked(
        {
            "fault": fault.kind,
            "action": action.name.lower(),
            "severity": fault.severity,
            "memory": fault.memory,
            "message": fault.message,
            "device": fault.device,
            "uuid": str(fault.reading.get("uuid", "")),
            "rank": fault.rank,
            "node": info.world.node,
            "host": socket.gethostname(),
            "reading": dict(fault.reading),
        }
    )
    fields = cast(dict[str, object], found)
    line = {name: value for name, value in fields.items() if name != "reading"}
    print(f"{PREFIX}{json.dumps({**line, 'step': state.step, 'run': info.id})}", file=sys.stderr, flush=True)
    directory = RunDirectory(info.directory)
    if not Ownership(directory, info.id, info.started).confirm():
        return
    try:
        events = EventWriter(directory.node_events_file(info.world.node) if info.world.node else directory.events_file)
        events.append("health", step=state.step or None, **fields)
        events.close()
    except (OSError, TypeError) as error:  # a reading is not plain JSON, or the disk is full
        _log.warning("the event of the fault is lost: %s", error)


_DEFAULT = "core"
"""The plugin whose answer counts only where no other has one."""
_REASONS = {
    FaultAction.STOP_SAVED: StopReason.FAULT,
    FaultAction.STOP_SUSPECT: StopReason.FAULT_SUSPECT,
    FaultAction.STOP_UNSAVED: StopReason.FAULT_UNSAVED,
}
_FAILED_CALL = re.compile(r"\bCU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)")
"""What libraries beside the runtime return when the device has failed below them; other codes tell of wrong arguments."""
_PREFIX = re.compile(r"(CUDA error|CUDA driver error|Triton Error \[CUDA\]): |Cuda failure( \d+)? '")
"""What comes before the text of CUDA in a message of an extension, of the driver's wrapper, of Triton, of NCCL."""
_FAULTS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "unknown error",
)
"""CUDA's texts (`cudaGetErrorString`) for what a device does not recover from; the driver, Triton and NCCL pass them on."""


_SOFTWARE = (
    "device-side assert triggered",
    "no kernel image is available for execution on the device",
    "invalid device function",
    "invalid configuration argument",
    "invalid device ordinal",
    "the provided PTX was compiled with an unsupported toolchain",
)
"""CUDA's texts for what a program has done wrong: another device would do the same."""


def is_fault(error: BaseException) -> bool:
    """Whether an exception tells of a failing accelerator.

    Errors of the device runtime (an illegal address, a lost device, an uncorrectable ECC error) come as AcceleratorError, those
    of cuBLAS, cuDNN, the driver and Triton as plain RuntimeErrors. NCCL's are faults if a CUDA call of this rank failed in it;
    other failures of a collective are those of another rank or of the network. Running out of memory is no fault, nor is a
    failed assertion of a kernel (an index out of range), or a kernel that was not built for the device.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or any(text in str(error) for text in _SOFTWARE):
        return False
    return isinstance(error, torch.AcceleratorError) or _cause(str(error)) is not None


def fault_of(error: BaseException, world: World) -> GpuFault:
    """The fault that such an exception stands for."""
    text = str(error)
    message = text.partition("\n")[0]
    if (cause := _cause(text)) is not None and cause not in message:
        message = f"{message}: {cause}"
    return GpuFault(kind="cuda_error", message=message, device=world.device, rank=world.rank)


def _cause(message: str) -> str | None:
    """The part of the message of a plain RuntimeError that reports a failing accelerator."""
    if (call := _FAILED_CALL.search(message)) is not None:
        return call[0]
    for place in _PREFIX.finditer(message):
        known = next((each for each in _FAULTS if message.startswith(each, place.end())), None)
        if known is not None:
            return known
    return None


@contextmanager
def faults_answered(run: Run, batch: Batch) -> Iterator[None]:
    """Around what is done with a batch: a fault of the accelerator is followed by what the plugins answer (`FaultAction`).

    In a single process the loop continues to the step boundary, whether it stops there or not. One of several ranks cannot
    reach it: it leaves with the fault as the reason, and another rank saves (`smalti.training.failures.emergency_save`).
    """
    try:
        yield
    except RuntimeError as error:
        if not is_fault(error):
            raise
        fault = fault_of(error, run.world)
        action = answer(run, fault)
        if run.world.size > 1:
            raise _left_by(fault) from error
        run.parallel.zero_grad()
        if action > FaultAction.CHECKPOINT:
            return
        if run.state.position <= batch.position:
            run.leave_out(batch)
        then = "this step is skipped" + (", saving" if action is FaultAction.CHECKPOINT else "")
        warn(run.plugins, run.state, f"{_message(fault)}; {then}, continuing", error)


@contextmanager
def faults_end(run: Run) -> Iterator[None]:
    """Around the loop: a fault that is met between two steps, as in a save, ends the run as a fault."""
    try:
        yield
    except RuntimeError as error:
        if is_fault(error):
            fault = fault_of(error, run.world)
            answer(run, fault)
            raise _left_by(fault) from error
        raise


def answer(run: Run, fault: GpuFault) -> FaultAction:
    """What follows an exception; it is also put into the state as a request, which the loop follows."""
    state, message = run.state, _message(fault)
    action = decide(run.plugins, state, fault, run.info)
    if not run.boundary.state_consistent:
        action, message = FaultAction.STOP_UNSAVED, f"{message}, while the weights were being changed"
    elif action < FaultAction.STOP_SAVED and state.skipped + 1 >= MOST_SKIPPED_STEPS:
        action, message = FaultAction.STOP_UNSAVED, f"{message}; {state.skipped + 1} steps in a row were skipped"
    request(state, action, message)
    return action


def answer_reported(run: Run) -> None:
    """Put what follows the faults that were reported since the last step boundary into the state, as requests."""
    for fault in run.state.take_faults() if run.state.has_faults else ():
        request(run.state, decide(run.plugins, run.state, fault, run.info), _message(fault))


def decide(plugins: Plugins, state: RunState, fault: GpuFault, info: RankInfo | None) -> FaultAction:
    """The largest action of the plugins. It is recorded where `info` is known, and reported to the plugins."""
    answers = ask_each(plugins, HookSpecs.on_gpu_fault, state, fault=fault)
    others = [action for name, action in answers.items() if name != _DEFAULT] or list(answers.values())
    action = max(others, default=FaultAction.STOP_UNSAVED)
    if info is not None:
        record_fault(info, state, fault, action)
    notify_each(plugins, HookSpecs.on_fault, state, fault=fault, action=action)
    return action


def request(state: RunState, action: FaultAction, message: str) -> None:
    """Put an action into the state as a request."""
    if action is FaultAction.CHECKPOINT:
        state.request_save()
    elif (reason := _REASONS.get(action)) is not None:
        state.request_stop(reason, message)


def _message(fault: GpuFault) -> str:
    return f"{fault.kind} on {fault.device} of rank {fault.rank}: {fault.message}"


def _left_by(fault: GpuFault) -> GpuFaultError:
    return GpuFaultError(f"{fault.kind} on {fault.device}: {fault.message}")
