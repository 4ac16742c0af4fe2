"""One rank: from the launcher's files to a finished run and an exit code. Started as `python -m smalti.worker RUN_DIR`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

from torch.distributed.elastic.multiprocessing.errors import record

from smalti.config import Config, restore, schema_of
from smalti.crew import Crew, LostRankError
from smalti.errors import ExitCode, GpuFaultError, UserError
from smalti.plugins import Plugins, Selection, load_plugins
from smalti.run import build, open_parallel
from smalti.rundir import RunDirectory
from smalti.strategy import choose_distributed
from smalti.trainer import train
from smalti.types import Outcome, RunState, StopReason

OUTCOME_VARIABLE = "SMALTI_OUTCOME_DIR"


def run_rank(config: Config, plugins: Plugins) -> Outcome:
    """Build and train on this rank. Every rank of the run calls it; an agreed stop returns on all of them."""
    plan = choose_distributed(config, plugins)
    with ExitStack() as signals, ExitStack() as closing:
        parallel = open_parallel(plan, config)
        closing.callback(parallel.close)
        crew = Crew.meet(parallel)
        with last_words(crew):
            run = build(config, plugins, plan, parallel, crew, closing)
            signals.enter_context(stop_signals(run.state))  # to the very end: what is said and closed last is not cut off
            outcome = train(run)
            parallel.barrier()  # nobody leaves the group while another still talks to it
        return outcome


@contextmanager
def last_words(crew: Crew) -> Iterator[None]:
    """An exception is written down before anything is closed: what closing does to other ranks comes after its cause.

    One that only tells of another rank's end is replaced by an error that says so.
    """
    try:
        yield
    except LostRankError as error:
        _leave_word(error.exit_code, describe(error), lost=error)
        raise
    except BaseException as error:
        lost = crew.notice(error)
        _leave_word(_code_of(lost or error), describe(lost or error), lost=lost)
        if lost is None:
            raise
        raise lost from error


@contextmanager
def stop_signals(state: RunState) -> Iterator[None]:
    """SIGINT and SIGTERM ask for an agreed stop; the second one ends a process that nobody launched.

    Under a launcher it is the launcher's to count: one signal from a scheduler can reach a rank twice, from the scheduler and
    passed on by torch's agent.
    """
    launched = OUTCOME_VARIABLE in os.environ

    def handle(number: int, frame: object) -> None:
        reason = StopReason.INTERRUPTED if number == signal.SIGINT else StopReason.PREEMPTED
        if state.stop_reason in (StopReason.INTERRUPTED, StopReason.PREEMPTED):
            if not launched:
                os._exit(reason.exit_code)
            return
        print("smalti: finishing the step, then saving; once more ends now", file=sys.stderr, flush=True)
        state.request_stop(reason, f"{reason.name.lower()} at step {state.step}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_run(directory: Path) -> tuple[Config, Plugins]:
    """The Config and plugins that the launcher resolved. Raises UserError when this machine has other plugins."""
    run = RunDirectory(directory)
    waiting = run.next_of(run.launch_file)
    latest = waiting if waiting.exists() else run.launch_file
    launch = cast(Mapping[str, object], json.loads(latest.read_text()))
    values = cast(Mapping[str, object], launch["values"])
    selection = Selection(only=_names(values["plugins"]), without=_names(values["without"]))
    plugins = load_plugins(selection)
    config = restore(schema_of(plugins), values, cast(Mapping[str, object], launch["user_accelerate"]))
    if list(plugins.lines) != launch["plugins"]:
        raise UserError(
            f"this machine has other plugins than the launcher: {', '.join(plugins.lines)}",
            fix=f"install the same ones: {', '.join(cast(list[str], launch['plugins']))}",
        )
    return config, plugins


def _names(value: object) -> tuple[str, ...]:
    return tuple(cast(list[str], value))


@record
def main(arguments: list[str] | None = None) -> None:
    """Entry point of a rank under a launcher. How it ended goes to the launcher in a file.

    A stop that all ranks agreed on is success for the launcher of processes, whatever its exit code means for the user:
    otherwise it would take the first rank's goodbye for a failure and kill the rest.
    """
    logging.basicConfig(format="smalti: %(message)s", level=logging.WARNING)
    directory = Path((arguments or sys.argv[1:])[0])
    try:
        outcome = run_rank(*load_run(directory))
    except BaseException as error:
        _leave_word(_code_of(error), describe(error))
        if isinstance(error, UserError):
            sys.exit(int(error.exit_code))
        raise
    _leave_word(outcome.exit_code, outcome.message)


def describe(error: BaseException) -> str:
    """One line for the end of the output: kind, message and the notes about who raised it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, UserError):
        return f"{error}{notes}"
    return f"{type(error).__name__}: {error}{notes}"


def _code_of(error: BaseException) -> ExitCode:
    return error.exit_code if isinstance(error, UserError | GpuFaultError) else ExitCode.FAILED


def _leave_word(code: int, message: str, *, lost: LostRankError | None = None) -> None:
    """For the launcher. The first word counts. `lost`: only the loss of another rank ended this one."""
    folder = os.environ.get(OUTCOME_VARIABLE)
    if folder is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    path = Path(folder) / f"rank-{rank}.json"
    if not path.exists():
        word: dict[str, object] = {"rank": rank, "exit_code": int(code), "message": message, "time": time.time()}
        if lost is not None:
            word |= {"follows": True, "saved": lost.saved, "ended": lost.ended}
        path.write_text(json.dumps(word))


if __name__ == "__main__":
    main()
