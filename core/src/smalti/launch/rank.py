"""One rank of a run, in any process: it builds, trains, handles signals, and reports how it ended before it closes anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from smalti.config import Config
from smalti.parallel import FailureDetector, LostRankError, Parallel, write_lost_report
from smalti.plugins import Plugins, choose_distributed, rank_observed
from smalti.rundir import RunWriter
from smalti.system import (
    STOPPING,
    SignalFilter,
    describe,
    exit_code_of,
    exit_within,
    ignore_later_signals,
    immediate_exit_code,
    launched,
    preemption_signals,
    print_from_handler,
    signal_handler,
    write_exit_report,
)
from smalti.training import (
    LEAVE_SECONDS,
    Context,
    FaultWatch,
    Watchdog,
    become_run,
    build,
    memory_explained,
    open_parallel,
    train,
)
from smalti.types import DistributedPlan, Outcome, RunState, StopReason

RECORDED_CALLS = ("TORCH_FR_BUFFER_SIZE", "200")
"""How many collective calls torch records, for whoever reports a hang. It reads this once, when it joins the process group."""


def run_rank(config: Config, plugins: Plugins, writer: RunWriter | None = None) -> Outcome:
    """Build and train on this rank. Called on every rank of the run; a stop returns on all of them.

    `writer` is given if this process owns the run directory already.
    """
    plan = choose_distributed(config, plugins)
    if launched():
        os.environ.setdefault(*RECORDED_CALLS)
    with ExitStack() as signals, opened(plan, config) as parallel, ExitStack() as closing:
        detector = FailureDetector.create(parallel)
        with exit_reported(detector):
            state = RunState(max_steps=0)
            with Watchdog(detector) as watchdog, FaultWatch(plugins, state, detector) as faults:
                with faults.interrupting():
                    writer = become_run(config, parallel, writer, closing)
                    context = Context.of(config, plugins, plan, parallel, detector, state, writer)
                    if parallel.world.size > 1:
                        from smalti.parallel import describe_phases

                        describe_phases(context.phases)
                    faults.info = context.info
                    closing.enter_context(rank_observed(plugins, state, context.info, context.phases))
                    with memory_explained(plugins, state, context.info):
                        run = build(context, closing)
                    watchdog.run = faults.run = run
                if writer is not None:
                    writer.begin_training()
                signals.enter_context(stop_signals(run.state))  # until the end, so that a signal cannot interrupt closing
                signals.callback(ignore_later_signals)
                outcome = train(run)
            if not run.parted:
                parallel.barrier()  # no rank leaves the process group while another still uses it
        return outcome


@contextmanager
def opened(plan: DistributedPlan, config: Config) -> Iterator[Parallel]:
    """Open the strategy on this rank. After a failure on one of several ranks it is not closed, and the process has to end.

    Destroying a process group is collective, at least with NCCL, and the other ranks would not join it.
    """
    parallel = open_parallel(plan, config)
    try:
        yield parallel
    except BaseException:
        if parallel.world.size == 1:
            parallel.close()
        raise
    parallel.close()


@contextmanager
def exit_reported(detector: FailureDetector) -> Iterator[None]:
    """Write an exit report for an exception before anything is closed, so that the cause is reported before its consequences.

    An exception that was caused by the loss of another rank is replaced by a LostRankError.
    """
    try:
        yield
    except BaseException as error:
        lost = error if isinstance(error, LostRankError) else detector.lost_rank(error)
        if launched() and detector.board is not None:
            exit_within(LEAVE_SECONDS, exit_code_of(lost or error))
        if lost is None:
            write_exit_report(exit_code_of(error), describe(error))
            raise
        write_lost_report(lost)
        if lost is error:
            raise
        raise lost from error


@contextmanager
def stop_signals(state: RunState) -> Iterator[None]:
    """Ctrl-C and `preemption_signals` request a stop of all ranks; a second one ends a process that has no launcher.

    Under a launcher, the launcher handles the second one: a signal of a scheduler can reach a rank twice, directly and
    forwarded by torch's agent.
    """
    launcher_handles_repeats = launched()
    signal_filter, stopping = SignalFilter(), False

    def handle(number: int, frame: object) -> None:
        nonlocal stopping
        if not signal_filter.accepts(number) or (stopping and launcher_handles_repeats):
            return
        if stopping:
            print_from_handler("ending now: what was saved before is complete, the steps since then are lost")
            os._exit(immediate_exit_code(number))
        stopping = True
        print_from_handler(STOPPING)
        state.request_stop(StopReason.INTERRUPTED if number == signal.SIGINT else StopReason.PREEMPTED)

    with signal_handler((signal.SIGINT, *preemption_signals()), handle):
        yield
