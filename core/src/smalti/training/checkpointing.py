"""Checkpoints as the loop sees them: what they hold, when they are begun and reported, what a failure means, and rotation."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

from smalti.checkpoint import SUSPECT, SaveError, Snapshot
from smalti.config import CheckpointOptions, ModelOptions, RunOptions
from smalti.errors import CheckpointError
from smalti.hookspecs import HookSpecs
from smalti.parallel import Communicator, portable_name, products
from smalti.plugins import notify_each
from smalti.training.metrics import broadcast_running_stats
from smalti.training.run import Assembled, Run
from smalti.types import Checkpoint, Outcome, StopReason

_log = logging.getLogger(__name__)


def save(run: Run, *, last: bool, suspect: bool = False) -> None:
    """Begin a checkpoint, once the one before has ended. *Collective*. The last one of a run is finished here."""
    with run.phases.during("saving"):
        poll_save(run, finish=True, last=last)
        run.state.save_requested = False
        blocking = last or not run.config[CheckpointOptions].checkpoint_async
        model = run.parallel.unwrap(run.model)
        broadcast_running_stats(model, run.parallel)
        buffers = [portable_name(name) for name, _ in model.named_buffers()]
        snapshot = replace(take_snapshot(run), flags=(SUSPECT,) if suspect else ())
        run.saver.begin(snapshot, changing=buffers, blocking=blocking)
        if blocking:
            poll_save(run, finish=True, last=last)


def poll_save(run: Run, *, finish: bool = False, last: bool = False) -> None:
    """Report the result of the pending save, if it has ended, on every rank at the same step. *Collective*.

    A failure becomes a request to stop where `--on_save_error=stop`; else the next interval tries again.
    """
    result = run.saver.poll(finish=finish)
    if result is None:
        return
    run.save_failure = result if isinstance(result, SaveError) else None
    if isinstance(result, Checkpoint):
        run.saved_step = result.step
        notify_each(run.plugins, HookSpecs.on_checkpoint, run.state, checkpoint=result)
        return
    stops = run.config[CheckpointOptions].on_save_error == "stop" or result.errno is None
    if run.world.is_main:
        then = "stopping" if stops else "older checkpoints are intact" + ("" if last else ", training continues")
        _log.warning("%s; %s%s", result.message, then, f"\n  fix: {result.fix}" if result.fix else "")
    notify_each(run.plugins, HookSpecs.on_checkpoint_failed, run.state, error=result)
    if stops:
        run.state.request_stop(StopReason.SAVE_FAILED, _with_last_good(run, result))


def finish_save(run: Run, outcome: Outcome) -> Outcome:
    """The outcome once the pending save has ended; a failure if the last one could not be written. *Collective*."""
    if outcome.reason in (StopReason.FAULT_UNSAVED, StopReason.TAKEN_OVER):
        return outcome  # the accelerator may have failed under the save as well, or nothing can be saved any more
    with run.phases.during("saving"):
        poll_save(run, finish=True, last=True)
    if outcome.reason is StopReason.UNSAVED:
        newest = run.checkpoints.latest() if run.world.is_main else None
        which = f"the newest is {newest}" if newest else "there is none"
        return Outcome(reason=outcome.reason, message=run.parallel.all_gather_text(f"{outcome.message}; {which}")[0])
    if run.save_failure is None or outcome.reason is StopReason.SAVE_FAILED:
        return outcome
    reason = run.parallel.all_gather_text(_with_last_good(run, run.save_failure))[0]
    if outcome.reason > StopReason.SAVE_FAILED:
        return Outcome(reason=outcome.reason, message=f"{outcome.message}; {reason}")
    return Outcome(reason=StopReason.SAVE_FAILED, message=reason)


def _with_last_good(run: Run, failure: SaveError) -> str:
    """The failure, and on the main rank where the run stands without this checkpoint."""
    if not run.world.is_main:
        return failure.message
    newest = run.checkpoints.latest()
    return f"{failure.message}; the last good checkpoint is {newest}" if newest else f"{failure.message}; there is no other"


def take_snapshot(run: Assembled) -> Snapshot:
    """The state as a checkpoint holds it; the tensors are the live ones. *Collective*."""
    state = run.state
    return Snapshot(
        step=state.step,
        state=run.parallel.state.portable(),
        ema=run.parallel.state.portable_weights(run.ema.shadows) if run.ema is not None else None,
        trainer={
            "step": state.step,
            "position": state.position,
            "epoch": state.epoch,
            "samples": state.samples,
            "effective_batch": run.effective_batch,
            "seed": run.config[RunOptions].seed,
            "timesteps": run.info.timesteps,
            "made_with": {
                "family": run.info.family,
                "precision": products(run.config, run.world.device.partition(":")[0]),
                "strategy": run.info.strategy,
                "base_model": run.config[ModelOptions].pretrained_model_name_or_path,
            },
            "data": run.data.identity.as_json(),
            **({"order_beginning": asdict(beginning)} if (beginning := run.data.order.beginning) else {}),
            **({"data_changes": run.data_changes} if run.data_changes else {}),
            **({"adapter": run.adapter} if run.adapter is not None else {}),
        },
        plugins=run.plugins.versions,
        config_digest=run.config.digest,
        model_config=run.model_config,
        confirm=run.ownership.check,
    )


def empty_snapshot(run: Assembled) -> Snapshot:
    """The snapshot into which a checkpoint is read, to be loaded afterwards. *Collective*."""
    return Snapshot(
        step=0,
        state=run.parallel.state.empty(),
        ema=run.parallel.state.empty_weights(run.ema.shadows) if run.ema is not None else None,
    )


def write(run: Assembled, snapshot: Snapshot, communicator: Communicator) -> Checkpoint:
    """Write a checkpoint, then remove the oldest ones. *Collective*; in the saver's thread."""
    root = run.checkpoints.root
    checkpoint = run.backend.decide(
        HookSpecs.save_checkpoint, state=snapshot, target=root, parallel=communicator, config=run.config
    )
    assert checkpoint is not None, "the core's own answer comes last"
    if run.world.is_main and run.ownership.confirm():
        rotate(run)
    return checkpoint


def rotate(run: Assembled) -> None:
    """Remove the oldest checkpoints beyond the limit. What cannot be removed stays."""
    try:
        run.checkpoints.rotate(run.config[CheckpointOptions].checkpoints_total_limit or None)
    except (CheckpointError, OSError) as error:
        _log.warning("no old checkpoint was removed: %s", error)
