"""Continuing a run from a checkpoint: which one, whether it belongs to the run, and the state that it restores."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from smalti.checkpoint import find_on_all_ranks
from smalti.config import LaunchOptions, RunOptions
from smalti.data import Beginning, Version, keep, total_steps
from smalti.errors import CheckpointError
from smalti.hookspecs import HookSpecs
from smalti.parallel import RankError
from smalti.plugins import is_url, open_run
from smalti.training.checkpointing import empty_snapshot
from smalti.training.resume_checks import Resumption, check_resumable, noise_level_notices
from smalti.training.run import Assembled

_log = logging.getLogger(__name__)


def resume(run: Assembled) -> None:
    """Continue from the checkpoint that the options name, if there is one. *Collective*.

    Hyper-parameters are the configuration's, not the checkpoint's: changing one and resuming is how it is changed.
    """
    found = chosen_checkpoint(run, run.config[RunOptions].resume_from_checkpoint)
    if found is not None:
        restore(run, found)
    identity = run.data.identity  # on every rank now, rather than in the first save
    if run.world.is_main:
        keep(identity, run.data.indexes, run.directory.data)  # for later resumes to compare with


def restore(run: Assembled, found: Path) -> None:
    """Fill the run from a checkpoint. *Collective*."""
    snapshot = empty_snapshot(run)
    loaded = run.backend.decide(
        HookSpecs.load_checkpoint, source=found, state=snapshot, parallel=run.parallel, config=run.config
    )
    assert loaded is not None, "the core's own answer comes last"
    check_adapter(run.adapter, loaded.trainer, found)
    if hasattr(run.optimizer, "check_saved"):  # where the same settings mean other steps than the saved optimizer's
        run.optimizer.check_saved(loaded.optimizer)
    resumption = check_resumable(loaded.trainer, run.config, run.data, found)
    groups = run.optimizer.param_groups
    configured = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    run.parallel.state.load(snapshot.state)
    for group, values in zip(groups, configured, strict=True):
        group.update(values)
    if run.ema is not None and snapshot.ema is not None and loaded.ema:
        run.parallel.state.copy_from(snapshot.ema, run.ema.shadows)
    elif run.ema is not None:
        run.ema.restart()
    notices = [*loaded.notices, *resumption.notices, *take_place(run, loaded.trainer, resumption)]
    notices += noise_level_notices(loaded.trainer, run.info.timesteps)
    if run.world.is_main:
        for notice in notices:
            _log.warning("%s", notice)
        _log.warning("resuming from %s at step %d", found, run.state.step)


def take_place(run: Assembled, trainer: Mapping[str, object], resumption: Resumption) -> list[str]:
    """Stand where the trainer stood that wrote the checkpoint; what the user should know about that.

    Another trainer's place in the data means nothing here, so a converted checkpoint has none. Where the order of samples is a
    new one, the run begins its next epoch with that, at the same position: no random number is drawn twice.
    """
    state, notices = run.state, []
    state.step = cast(int, trainer["step"])
    run.data_changes = [*cast(list[object], trainer.get("data_changes", []))]
    if resumption.changes:
        run.data_changes.append({"step": state.step, "changes": list(resumption.changes)})
        notices.append(f"the data have changed, and training continues with what is there now: {'; '.join(resumption.changes)}")
    if "position" in trainer:
        state.position, state.epoch, state.samples = (cast(int, trainer[name]) for name in ("position", "epoch", "samples"))
        beginning = cast("Mapping[str, int] | None", trainer.get("order_beginning"))
        if resumption.reordered:
            beginning = {"position": state.position, "epoch": state.epoch + (state.position > 0)}
        continue_order(run, None if beginning is None else Beginning(**beginning), resumption.version)
        return notices
    state.position = state.step
    state.epoch = run.data.order.epoch_of(state.position)
    state.samples = state.step * run.effective_batch
    if state.step == 0:
        return notices
    return [*notices, f"the checkpoint tells no place in the data; as each step takes one batch, {state.step} are left out"]


def continue_order(run: Assembled, beginning: Beginning | None, version: Version | None) -> None:
    """Make the order of samples that of the checkpoint, where it is not what a new run would have."""
    if beginning is None and version is None:
        return
    run.data = replace(run.data, order=run.data.order.changed_to(version=version, beginning=beginning))
    run.state.max_steps = total_steps(run.config, run.data)


def chosen_checkpoint(run: Assembled, choice: str) -> Path | None:
    """The checkpoint that rank 0 finds and all ranks verify, on every rank; its error too. *Collective*."""
    try:
        if is_url(choice):
            # The launcher has written it before it started the ranks. Only the main rank's choice is used.
            choice = str(open_run(choice, run.plugins, run.config).brought(run.directory) or choice)
        shared = run.config[LaunchOptions].shared_output_dir
        return find_on_all_ranks(run.parallel, run.checkpoints, choice, shared=shared)
    except RankError as failure:
        raise CheckpointError(f"cannot resume from {choice!r}: {failure}", fix=failure.fix) from failure


def check_adapter(mine: Mapping[str, object] | None, trainer: Mapping[str, object], source: Path) -> None:
    """Refuse what would make the meaning of an adapter another one without saying so. A value None of mine is not known."""
    adapter = cast(Mapping[str, object] | None, trainer.get("adapter"))
    unknown = {name: None for name, value in (mine or {}).items() if value is None}
    if (adapter and {**adapter, **unknown}) != mine:
        raise CheckpointError(
            f"{source} holds another adapter than this run trains: {adapter} there, {mine} here",
            fix="give the same --pretrained_model_name_or_path and options of the adapter (smalti train --help lora), "
            "or start a new run in a new --output_dir",
        )
