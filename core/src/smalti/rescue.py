"""When another rank is lost in the middle of a step: what is left of the run is saved, without the others.

Weights, moments and averages do not change between one step boundary and the next optimizer step, so where every rank holds all
of them, each healthy rank still has the last boundary. The lowest of them writes an ordinary checkpoint of it, as a single
process would. At most the running step is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from smalti.checkpoint.manifest import SUSPECT
from smalti.checkpoint.writer import SaveError
from smalti.crew import Roll
from smalti.observers import notify
from smalti.parallel import Ranks
from smalti.run import Run
from smalti.types import StopReason

_log = logging.getLogger(__name__)


@contextmanager
def rescued(run: Run) -> Iterator[None]:
    """Around the loop. An exception that comes from the loss of another rank becomes a LostRankError, after an emergency save.

    This rank's own failures stay what they are; they are only told to the others, who then do not have to guess.
    """
    try:
        yield
    except BaseException as caught:
        defect = run.saver.defect  # the others have left because of it
        error = caught if caught.__cause__ is defect else defect or caught
        distrusted = run.state.stop_reason is StopReason.FAULT_UNSAVED
        roll = run.crew.call_roll(error, whole=run.whole, suspect=distrusted)
        if roll is None:
            if error is caught:
                raise
            raise error from None
        ended = run.crew.end_hanging(roll)
        run.saver.wait()
        saved, unsaved = "", ""
        try:
            saved, unsaved = last_boundary(run, roll)
        except (SaveError, OSError) as failure:
            unsaved = f"step {run.state.step} could not be saved: {failure}"
        if saved or unsaved:
            _log.warning("%s", saved or unsaved)
        raise run.crew.explain(roll, error, saved=saved, unsaved=unsaved, ended=ended) from error


def last_boundary(run: Run, roll: Roll) -> tuple[str, str]:
    """Save the last step boundary if that falls to this rank; what to tell of it, and what to tell of it if it was not saved.

    Raises SaveError or OSError.
    """
    alone = run.parallel.alone()
    if alone is None:
        return "", ""
    if not run.whole:
        return "", "its weights were just being changed, so it has not saved them"
    if roll.saver != run.world.rank or run.state.step == 0:
        return "", ""
    return save_alone(run, alone, suspect=roll.suspect), ""


def save_alone(run: Run, alone: Ranks, *, suspect: bool) -> str:
    """Write a checkpoint of the last step boundary unless there is one; returns what to tell of it.

    `suspect` marks it as made after a fault of the machine: it never displaces one that is not. Raises SaveError or OSError.
    """
    step = run.state.step
    for entry in reversed(run.checkpoints.all()):
        if entry.step == step and not entry.problem:
            return f"step {step} was saved before: {entry.path}"
    snapshot = run.snapshot()
    checkpoint = run.write(replace(snapshot, flags=(*snapshot.flags, SUSPECT)) if suspect else snapshot, alone)
    notify(run.plugins, "on_checkpoint", run.state, checkpoint=checkpoint)
    return f"saved step {step} from rank {run.world.rank} before leaving: {checkpoint.path}"
