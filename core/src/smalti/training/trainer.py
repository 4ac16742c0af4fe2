"""The loop. Read `smalti.hookspecs` beside it: the hooks fire here, under the same names."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from smalti.config import CheckpointOptions, LaunchOptions, TrainingOptions
from smalti.data import Batch
from smalti.hookspecs import HookSpecs
from smalti.models import attention_kernel, products_in_tf32, tf32_choice
from smalti.plugins import observed, summary, warn
from smalti.training.checkpointing import finish_save, poll_save, save
from smalti.training.failures.attempts import attempt
from smalti.training.failures.disk_space import wait
from smalti.training.failures.emergency_save import emergency_save_on_failure, save_from_healthy_rank
from smalti.training.failures.faults import answer_reported, faults_answered, faults_end, is_fault
from smalti.training.failures.out_of_memory import memory_explained
from smalti.training.failures.step_times import ForwardTime
from smalti.training.periodic import is_due
from smalti.training.run import PeriodicWork, QueuedStep, Run, reseed, visits_of
from smalti.types import Outcome, StepBoundary, StopReason


def train(run: Run) -> Outcome:
    """Train until the step budget is spent or something asks to stop. Every rank returns the same outcome."""
    with (
        observed(run.plugins, run.state, run.info) as ended,
        emergency_save_on_failure(run),
        faults_end(run),
        memory_explained(run.plugins, run.state, run.info, run),
    ):
        compiles = run.config[LaunchOptions].dynamo_backend is not None  # in the first step
        run.phases.enter("compiling" if compiles else "training")
        for work in run.periodic:
            work.start(run)
        run.parallel.barrier()  # waits for ranks that are late, as collective calls of a step do not
        try:
            outcome = loop(run)
        except Exception as error:
            if run.world.size == 1 and not is_fault(error):
                run.settle()  # the step before the failure; among several ranks it may never end
            raise
        ended.append(outcome)
    return outcome


def loop(run: Run) -> Outcome:
    if run.state.step >= run.state.max_steps:
        return Outcome(reason=StopReason.COMPLETED, message=f"already at step {run.state.step} of {run.state.max_steps}")
    for batch in run.batches:  # endless; on this rank's device; continues from the last checkpoint
        with faults_answered(run, batch):
            train_step(run, batch)
            poll_save(run)  # whether a background save has finished
        actions = agree(run)
        if actions.paused:
            with run.phases.during("paused"):
                while actions.paused:
                    wait(run.phases, run.info.writer)
                    actions = agree(run)
        if actions.save:
            suspect = actions.outcome is not None and actions.outcome.reason is StopReason.FAULT_SUSPECT
            save(run, last=actions.outcome is not None, suspect=suspect)  # before anything that can fail
        if actions.outcome is not None:
            ended = save_from_healthy_rank(run, finish_save(run, actions.outcome))
            return finish(run, actions, ended)  # every rank returns here, or none does
        with faults_answered(run, batch):
            do_periodic_work(run, actions)
        if actions.save or actions.work:
            run.parallel.barrier()  # waits for ranks whose hooks take longer
    raise AssertionError("the stream of batches is endless")


def do_periodic_work(run: Run, actions: StepActions) -> list[str]:
    """Validate, evaluate and so on, as the ranks have agreed; returns what failed, a sentence each. *Collective*."""
    return [failed for work in actions.work if (failed := attempt(run, work.name, work.run))]


def finish(run: Run, actions: StepActions, outcome: Outcome) -> Outcome:
    """Do what is due after the last step. The run is over and saved: a failure only adds to the outcome's message."""
    run.boundary.final = True
    try:
        failed = do_periodic_work(run, actions)
    except Exception as error:  # noqa: BLE001 - or another rank was lost; the trained state is saved
        run.parted = True
        failed = [f"the last {' or '.join(work.name for work in run.periodic)} failed: {summary(error)}"]
        warn(run.plugins, run.state, failed[0], error)
    return replace(outcome, message="; ".join((outcome.message, *failed)))


def train_step(run: Run, batch: Batch) -> None:
    """One optimizer step: micro-batches forward and backward, clip, step, EMA.

    Whether loss and gradients are finite is known on all ranks before any weight changes; of an optimizer that
    `StepsInBackward`, whether the loss is. Or, where the run `looks_back`, on the device alone, which leaves the step out if
    they are not: the step counts as one until `Run.settle` tells, once the next forward pass is queued.
    """
    begin, forward_time = time.perf_counter(), ForwardTime(run.world.device)
    reseed(run, batch.position)
    total = torch.zeros(len(run.loss.names), device=run.world.device)
    seen = list[tuple[torch.Tensor, torch.Tensor]]()
    kernel, tf32 = run.config[TrainingOptions].sdpa_backend, tf32_choice(run.config, run.world.device)
    turns = [(micro, turn) for micro in batch.micro for turn in run.loss.turns]
    for number, (micro, turn) in enumerate(turns, start=1):
        with run.parallel.accumulate(last=number == len(turns)), run.loss.at(turn, run.model):
            try:
                with forward_time.measured():
                    losses = run.loss(run.model, micro, run.parallel, turn)
                    parts = losses.parts / len(turns)
            finally:
                begin += run.settle()  # the step before
            with attention_kernel(kernel), products_in_tf32(tf32):  # recomputation is part of it
                run.backward(parts.sum())
        total += parts.detach()
        if turn == run.loss.turns[0]:
            seen.append((losses.samples, losses.fractions))
    read, steps = run.check(run.parallel.mean(total), run.clip_gradients(), [samples for samples, _ in seen])
    state, learning_rate = run.state, float(run.optimizer.param_groups[0]["lr"])
    run.leave_boundary()
    if steps:
        run.parallel.step()
    else:
        run.parallel.zero_grad()
    run.queued = QueuedStep(
        batch=replace(batch, micro=()),
        visits=visits_of(batch, [fractions for _, fractions in seen]),
        read=read,
        begun_at=(state.step, state.skipped),
        learning_rate=learning_rate,
        seconds=time.perf_counter() - begin,
        data_seconds=run.batches.waited,
        forward_time=forward_time,
    )
    if run.looks_back:
        state.step, state.skipped = state.step + 1, 0
    else:
        run.settle()


@dataclass(frozen=True, kw_only=True)
class StepActions:
    """What all ranks do between this step and the next."""

    work: tuple[PeriodicWork, ...] = ()
    save: bool = False
    outcome: Outcome | None = None
    paused: bool = False
    """The same is agreed on again, a little later."""


def agree(run: Run) -> StepActions:
    """Agree with all ranks on what comes next. *Collective*.

    A stop takes precedence; requests that it defers are repeated after the next step. One number per step carries the stop
    reason above one bit each for pausing, saving and each periodic work, because all of them are collective. The largest number
    counts: what is due by the step is so on every rank, and a request of one rank may be left to the next step. What is due
    after a step that does not count yet is asked again when it does.
    """
    state, count = run.state, len(run.periodic)
    if state.step >= state.max_steps:
        run.settle()
    wanted, boundary = wishes(run)
    agreed = run.parallel.all_reduce_max(wanted)
    if agreed and run.queued is not None:
        run.settle()
        wanted, boundary = wishes(run)
        agreed = run.parallel.all_reduce_max(wanted)
    reason, saves, pauses = StopReason(agreed >> count + 2), bool(agreed >> count & 1), bool(agreed >> count + 1 & 1)
    due = tuple(each for bit, each in enumerate(run.periodic) if agreed >> bit & 1)
    if reason is StopReason.PREEMPTED:
        run.plugins.notify(HookSpecs.on_step_boundary, state=state, boundary=replace(boundary, agreed=reason))
        reason = StopReason(run.parallel.all_reduce_max(max(reason, state.stop_reason)))
    if reason is StopReason.NONE:
        return StepActions(paused=True) if pauses else StepActions(work=due, save=saves)
    how = "stopped on request" if reason is StopReason.REQUESTED else reason.name.lower()
    mine = state.stop_message or f"{how} at step {state.step} of {state.max_steps}"
    messages = run.parallel.all_gather_text(mine if state.stop_reason is reason else "")
    outcome = Outcome(reason=reason, message=next(message for message in messages if message))
    return StepActions(work=due if reason is StopReason.COMPLETED else (), save=reason.saves, outcome=outcome)


def wishes(run: Run) -> tuple[int, StepBoundary]:
    """What this rank asks for, as the number that `agree` describes, once plugins have seen the boundary."""
    state, count = run.state, len(run.periodic)
    answer_reported(run)
    saves = state.save_requested or is_due(state, run.config[CheckpointOptions].checkpoint_step_interval)
    work = sum(each.is_due(run) << bit for bit, each in enumerate(run.periodic))
    boundary = StepBoundary(
        saves=saves, validates=work > 0, saving=run.saver.is_pending, warn=partial(warn, run.plugins, state)
    )
    run.plugins.notify(HookSpecs.on_step_boundary, state=state, boundary=boundary)
    if broken := run.batches.budget_exhausted:
        state.request_stop(StopReason.ERROR_BUDGET, broken)
    if state.step >= state.max_steps:
        state.request_stop(StopReason.COMPLETED, f"trained {state.step} steps")
    pauses = run.disk_space.pauses(state, is_main=run.world.is_main)
    return int(state.stop_reason) << count + 2 | pauses << count + 1 | saves << count | work, boundary
