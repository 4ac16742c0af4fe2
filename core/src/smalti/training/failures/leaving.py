"""A rank leaves in place of its main thread, which does not come back: it saves, reports, and ends the process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from smalti.errors import ExitCode
from smalti.hookspecs import HookSpecs
from smalti.plugins import notify_each
from smalti.system import describe, exit_within, flush_standard_streams, write_exit_report
from smalti.training.run import Run

LEAVE_SECONDS = 60.0
"""A rank that has to leave because of a failure does so in this time, counted from the last progress of a save."""
_FAREWELL_SECONDS = 10.0


def leave(error: BaseException, code: ExitCode, run: Run | None, save: Callable[[], BaseException]) -> NoReturn:
    """End the process with this code, because of `error`. `save` saves what it can, and returns the error to tell observers."""
    exit_within(LEAVE_SECONDS, code)
    try:
        last = save()
        if run is not None:
            _tell_observers(run, last)
    except BaseException as failure:  # noqa: BLE001 - the top of all that is left of this process
        write_exit_report(code, f"{describe(error)}; then {describe(failure)}")
        traceback.print_exc()
    flush_standard_streams()
    os._exit(code)


def _tell_observers(run: Run, error: BaseException) -> None:
    """Call the last hooks, for as long as they may take; one of them can be what the main thread waits for."""

    def tell() -> None:
        notify_each(run.plugins, HookSpecs.on_error, run.state, error=error)
        notify_each(run.plugins, HookSpecs.on_train_end, run.state, outcome=None)
        notify_each(run.plugins, HookSpecs.on_rank_end, run.state, error=error)
        if run.info.writer is not None:
            run.info.writer.close()

    telling = threading.Thread(target=tell, name="smalti-farewell", daemon=True)
    telling.start()
    telling.join(_FAREWELL_SECONDS)
