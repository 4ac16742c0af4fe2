"""One rank of a run, in whatever process: builds, trains, obeys signals, leaves its last words before anything is closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from smalti.config import Config
from smalti.parallel import FailureDetector, LostRankError, Parallel, write_lost_report
from smalti.plugins import Plugins, choose_distributed
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
from smalti.training import LEAVE_SECONDS, Watchdog, become_run, build, memory_explained, open_parallel, train
from smalti.types import DistributedPlan, Outcome, RunState, StopReason


def run_rank(config: Config, plugins: Plugins, writer: RunWriter | None = None) -> Outcome:
    """Build and train on this rank. Every rank of the run calls it; an agreed stop returns on all of them.

    `writer` is the run directory, if this process holds it already.
    """
    plan = choose_distributed(config, plugins)
    with ExitStack() as signals, opened(plan, config) as parallel, ExitStack() as closing:
        detector = FailureDetector.meet(parallel)
        with exit_reported(detector):
            with Watchdog(detector) as watchdog:
                writer = become_run(config, parallel, writer, closing)
                with memory_explained(config, parallel.world):
                    run = watchdog.run = build(config, plugins, plan, parallel, detector, closing, writer)
                if writer is not None:
                    writer.begin_training()
                signals.enter_context(stop_signals(run.state))  # to the very end: what is said and closed last is not cut off
                signals.callback(ignore_later_signals)
                outcome = train(run)
            if not run.parted:
                parallel.barrier()  # nobody leaves the group while another still talks to it
        return outcome


@contextmanager
def opened(plan: DistributedPlan, config: Config) -> Iterator[Parallel]:
    """This rank's end of the backend. After a failure on one of several ranks it is not closed, and the process has to end.

    To take down a process group is one more thing that ranks do together, at least with NCCL: the others would not come.
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
    """An exception is written down before anything is closed: what closing does to other ranks comes after its cause.

    One that only tells of another rank's end is replaced by an error that says so.
    """
    try:
        yield
    except BaseException as error:
        lost = error if isinstance(error, LostRankError) else detector.notice(error)
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
    """Ctrl-C and `preemption_signals` ask for an agreed stop; another one that counts ends a process that nobody launched.

    Under a launcher it is the launcher's to count: one signal from a scheduler can reach a rank twice, from the scheduler and
    passed on by torch's agent.
    """
    counted_elsewhere = launched()
    signal_filter, asked = SignalFilter(), False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if not signal_filter.accepts(number) or (asked and counted_elsewhere):
            return
        if asked:
            print_from_handler("ending now: what was saved before is complete, the steps since then are lost")
            os._exit(immediate_exit_code(number))
        asked = True
        print_from_handler(STOPPING)
        state.request_stop(StopReason.INTERRUPTED if number == signal.SIGINT else StopReason.PREEMPTED)

    with signal_handler((signal.SIGINT, *preemption_signals()), handle):
        yield
