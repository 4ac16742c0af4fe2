"""Telling observers what happens. One that fails takes nothing from the others, and nothing from the run.

Not for `on_step_end`, whose exceptions end the run, nor for `log_metrics`, which switches a tracker off
(`smalti.training.metrics`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import cast

import pluggy

from smalti.errors import UserError
from smalti.plugins.registry import Plugins
from smalti.types import Outcome, RunInfo, RunState

_log = logging.getLogger(__name__)


def notify(plugins: Plugins, hook: str, state: RunState, *, but: Collection[str] = (), **arguments: object) -> list[Exception]:
    """Call a notify hook of every plugin, in the usual order, whatever the others do; failures are reported and returned.

    `but` names plugins that are left out.
    """
    return _call(plugins, hook, state, but, arguments)[1]


def consult(plugins: Plugins, hook: str, state: RunState, **arguments: object) -> dict[str, object]:
    """The answers to a gather hook by plugin; one that fails has none, and is reported."""
    return _call(plugins, hook, state, (), arguments)[0]


def _call(
    plugins: Plugins, hook: str, state: RunState, but: Collection[str], arguments: dict[str, object]
) -> tuple[dict[str, object], list[Exception]]:
    answers: dict[str, object] = {}
    failures: list[Exception] = []
    for name in _order(plugins, hook):
        if name in but:
            continue
        try:
            for answer in plugins.call_only(name, hook, state=state, **arguments):
                answers[name] = answer
        except Exception as error:  # noqa: BLE001 - the isolation of observers: whatever one raises, the others have their turn
            failures.append(error)
            message = f"plugin {name!r} ({plugins.infos[name].source}) failed in hook {hook!r}: {summary(error)}"
            if hook == "on_warning":
                _write(message, error)
            else:
                warn(plugins, state, f"{message}; the run is not affected", error)
    return answers, failures


def warn(plugins: Plugins, state: RunState, message: str, error: Exception, *, quiet: bool = False) -> None:
    """Report something that failed and that the run goes on without: to the log, unless `quiet`, and to the observers.

    The log gets the traceback too, but for what the user or the system is to blame for.
    """
    if not quiet:
        _write(message, error)
    notify(plugins, "on_warning", state, message=message, error=error)


def _write(message: str, error: Exception) -> None:
    _log.warning("%s", message, exc_info=None if is_expected(error) else error)


def is_expected(error: BaseException) -> bool:
    """Whether an exception says all that matters in its message: an error of the user's or of the system's."""
    return isinstance(error, UserError | OSError)


def summary(error: BaseException) -> str:
    """Kind and message; of a UserError the message and the fix."""
    if isinstance(error, UserError):
        return f"{error.message}; fix: {error.fix}" if error.fix else error.message
    told = f"{error}".partition("\n")[0]
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


@contextmanager
def observed(plugins: Plugins, state: RunState, info: RunInfo) -> Iterator[list[Outcome]]:
    """Observers are told of the start, of an exception that leaves the block, and always of the end, each one of them.

    The block puts the outcome into the list. An exception in `on_train_start` leaves too; then the end is told to those only
    that were told of the start. What fails in the telling becomes a note on the exception that is under way.
    """
    ended: list[Outcome] = []
    unstarted: list[str] = []
    under_way: BaseException | None = None
    try:
        unstarted += _order(plugins, "on_train_start")
        while unstarted:
            plugins.call_only(unstarted[0], "on_train_start", state=state, info=info)
            del unstarted[0]
        yield ended
    except BaseException as error:
        under_way = error
        _note(error, notify(plugins, "on_error", state, but=unstarted, error=error))
        raise
    finally:
        outcome = ended[0] if ended and under_way is None else None
        _note(under_way, notify(plugins, "on_train_end", state, but=unstarted, outcome=outcome))


def _note(error: BaseException | None, failures: list[Exception]) -> None:
    for failure in failures if error is not None else ():
        told = ", ".join((summary(failure), *getattr(failure, "__notes__", ())))
        cast(BaseException, error).add_note(f"after that: {told}")


def _order(plugins: Plugins, hook: str) -> list[str]:
    """The plugins that implement a hook, in the order in which they are called."""
    caller = cast(pluggy.HookCaller, getattr(plugins.hook, hook))
    return [each.plugin_name for each in reversed(caller.get_hookimpls())]
