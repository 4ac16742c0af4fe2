"""When another rank is lost in the middle of a step, or all have failed: what is left of the run is saved, without the others.

Weights, optimizer state and EMA do not change between one step boundary and the next optimizer step. So where every rank has
all of them, each healthy rank still has the state of the last boundary. The lowest of them writes an ordinary checkpoint of it,
as a single process would. At most the running step is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from smalti.checkpoint import SUSPECT, SaveError, Snapshot, checkpoint_name
from smalti.errors import GpuFaultError, TakenOverError
from smalti.hookspecs import HookSpecs
from smalti.parallel import Communicator, FailureDetector, LostRankError, RankStatuses
from smalti.plugins import notify_each, summary
from smalti.system import note_progress
from smalti.training.checkpointing import take_snapshot, write
from smalti.training.failures.out_of_memory import OutOfMemory
from smalti.training.run import Run
from smalti.types import Outcome, StopReason

_TIMEOUT = 30.0
"""Seconds for one tensor to leave an accelerator, and for a save under way to fail; many times what either takes."""
_POLL_SECONDS = 0.25
_log = logging.getLogger(__name__)


@contextmanager
def emergency_save_on_failure(run: Run) -> Iterator[None]:
    """Around the loop. An exception caused by a lost rank becomes a LostRankError, after an emergency save.

    This rank's own failures are raised unchanged, and reported to the other ranks.
    """
    try:
        yield
    except BaseException as caught:
        local_error = run.saver.local_error  # the others have left because of it
        error = caught if caught.__cause__ is local_error else local_error or caught
        lost = emergency_save(run, error, run.detector)
        if lost is not None:
            raise lost from error
        if error is caught:
            raise
        raise error from None


def emergency_save(run: Run, error: BaseException, detector: FailureDetector, *, aside: bool = False) -> LostRankError | None:
    """Find out which ranks are lost, save if this rank is to save, and return the error with which to end this rank.

    None if `error` is this rank's own. `aside`: called in another thread than the loop's, which may be stuck in a call to the
    accelerator; then nothing here waits for the accelerator.
    """
    distrusted = run.state.stop_reason in (StopReason.FAULT_SUSPECT, StopReason.FAULT_UNSAVED)
    statuses = detector.diagnose(error, state_consistent=run.boundary.state_consistent, suspect=distrusted)
    if statuses is None:
        save_after_failure(run, error, detector)
        return None
    ended = detector.end_hanging(statuses)
    saved, unsaved = "", ""
    try:
        if not run.saver.wait(_TIMEOUT if aside else None):
            raise SaveError(f"the save of step {run.saver.pending_step}, which is in progress, does not finish")
        if run.ema is not None and not run.ema.wait(_TIMEOUT if aside else None):
            raise SaveError("the update of the EMA does not finish")
        saved, unsaved = last_boundary(run, statuses, aside=aside)
    except (SaveError, TakenOverError, OSError) as failure:
        unsaved = f"step {run.state.step} could not be saved: {failure}"
    if saved or unsaved:
        _log.warning("%s", saved or unsaved)
    return detector.explain(statuses, error, saved=saved, unsaved=unsaved, ended=ended)


def save_after_failure(run: Run, error: BaseException, detector: FailureDetector) -> None:
    """Save the last step boundary after a failure of this rank's own, where no rank without one is left to do so.

    The result is a note on the error. Not after a fault of the accelerator, where plugins have answered what to do
    (`FaultAction`), nor after a checkpoint that could not be written.
    """
    ranks = run.parallel.local_communicator() if run.world.size > 1 else run.parallel
    unfit = isinstance(error, GpuFaultError | SaveError) or error is run.saver.local_error or not isinstance(error, Exception)
    if ranks is None or unfit or run.state.step == 0 or run.boundary.final or not run.boundary.state_consistent:
        return
    if not detector.saves_after_all_failed():
        return
    try:
        if isinstance(error, OutOfMemory):
            run.parallel.zero_grad()  # the gradients; what is copied off the device needs no more of it
        run.saver.wait()
        result = save_alone(run, ranks, suspect=False)
    except Exception as failure:  # noqa: BLE001 - the process ends; whatever fails here must not take the place of its cause
        result = f"step {run.state.step} could not be saved: {summary(failure)}"
    _log.warning("%s", result)
    error.add_note(result)


def save_from_healthy_rank(run: Run, outcome: Outcome) -> Outcome:
    """The outcome, after a checkpoint that is marked as suspect where the agreed reason is FAULT_UNSAVED. *Collective*.

    It is saved by the lowest rank without such a fault, if each rank holds the whole state.
    """
    alone = run.parallel.local_communicator() if run.world.size > 1 else None
    if outcome.reason is not StopReason.FAULT_UNSAVED or alone is None or run.state.step == 0:
        return outcome
    failed = run.parallel.all_gather_text("1" if run.state.stop_reason is outcome.reason else "")
    result = ""
    if "" in failed and failed.index("") == run.world.rank:
        try:
            if not run.saver.wait(_TIMEOUT) or (run.ema is not None and not run.ema.wait(_TIMEOUT)):
                raise SaveError("the save in progress does not finish")
            result = save_alone(run, alone, suspect=True)
        except (SaveError, TakenOverError, OSError) as failure:
            result = f"step {run.state.step} could not be saved: {failure}"
    return replace(outcome, message="; ".join(filter(None, (outcome.message, *run.parallel.all_gather_text(result)))))


def last_boundary(run: Run, statuses: RankStatuses, *, aside: bool = False) -> tuple[str, str]:
    """Save the last step boundary if this rank is to save. Returns what was saved, and why it was not, as texts to report.

    Raises SaveError, TakenOverError or OSError.
    """
    alone = run.parallel.local_communicator()
    if alone is None:
        return "", f"no emergency save was possible, because no rank holds the whole state; {steps_lost(run)}"
    if not run.boundary.state_consistent:
        return "", "its weights were just being changed, so it has not saved them"
    if statuses.saver != run.world.rank or run.state.step == 0:
        return "", ""
    return save_alone(run, alone, suspect=statuses.suspect, aside=aside), ""


def steps_lost(run: Run) -> str:
    """Which checkpoint is the newest, how many steps are lost, and what became of a save in progress, as text to report.

    By the manifests: every rank reads them now, and digests of a large checkpoint would take minutes.
    """
    entries = [entry for entry in run.checkpoints.all() if not entry.problem]
    newest = max(entries, key=lambda entry: (not entry.suspect, entry.step, entry.revision), default=None)
    lost = run.state.step - (newest.step if newest is not None else 0)
    steps = "no step is" if lost <= 0 else "1 step is" if lost == 1 else f"{lost} steps are"
    there = f"the newest checkpoint is {newest.path}" if newest is not None else "there is no checkpoint yet"
    parts = [f"{there}, so {steps} lost"]
    if (pending := run.saver.pending_step) is not None:
        complete = any(entry.step == pending for entry in entries)
        parts.append(f"the save of step {pending}, which was in progress, was {'completed' if complete else 'dropped'}")
    return "; ".join(parts)


def save_alone(run: Run, alone: Communicator, *, suspect: bool, aside: bool = False) -> str:
    """Write a checkpoint of the last step boundary unless there is one; returns the text to report.

    `suspect` marks it as made after a fault of the machine: it never displaces one that is not. Where a link between nodes is
    cut, a rank on each side may save the same step: the second one waits for the first. Raises SaveError, TakenOverError or
    OSError.
    """
    run.ownership.check()
    if found := _saved(run):
        return found
    snapshot = off_device(run) if aside else take_snapshot(run)
    try:
        checkpoint = write(run, replace(snapshot, flags=(*snapshot.flags, SUSPECT)) if suspect else snapshot, alone)
    except SaveError:
        until = time.monotonic() + _TIMEOUT
        while not (found := _saved(run)) and _is_being_saved(run) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if not found:
            raise
        return found
    notify_each(run.plugins, HookSpecs.on_checkpoint, run.state, checkpoint=checkpoint)
    return f"saved step {run.state.step} from rank {run.world.rank} before leaving: {checkpoint.path}"


def _saved(run: Run) -> str:
    """Where this launch has saved the last step boundary, as a text to report; "" if it has not.

    A checkpoint of the same step that was there before is of another launch, whose state may be another one.
    """
    step, resumed = run.state.step, run.state.step == run.state.resumed
    for entry in reversed(run.checkpoints.all()):
        if entry.step == step and not entry.problem and (resumed or entry.path.name not in run.older_checkpoints):
            return f"step {step} was saved {'before' if step == run.saved_step else 'by another rank'}: {entry.path}"
    return ""


def _is_being_saved(run: Run) -> bool:
    """Whether another rank is saving the last step boundary."""
    return any(run.checkpoints.root.glob(f".partial-{checkpoint_name(run.state.step)}-*"))


def off_device(run: Run) -> Snapshot:
    """The state in host memory, copied beside all that the accelerator was asked for since the last step boundary.

    Raises SaveError when it does not answer.
    """
    snapshot, device = take_snapshot(run), torch.device(run.world.device)
    if device.type == "cpu":
        return snapshot
    tensors = snapshot.tensors()
    copies: dict[str, Tensor] = {}
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            torch.accelerator.set_device_index(run.world.local_rank)
            with run.boundary.stream(device):
                for name, tensor in tensors.items():
                    copies[name] = tensor.detach().cpu()
                    note_progress()
        except RuntimeError as failure:
            failures.append(failure)

    copying = threading.Thread(target=copy, name="smalti-copy", daemon=True)
    copying.start()
    done = -1
    while copying.is_alive() and len(copies) > done:
        done = len(copies)
        copying.join(_TIMEOUT)
    if failures or copying.is_alive():
        raise SaveError(f"the accelerator does not give it: {failures[0] if failures else 'no answer'}")
    return snapshot.replaced(copies)
