"""Hooks that observe a run. A plugin that fails in one affects neither the other plugins nor the run.

Not for `on_step_end`, whose exceptions end the run, nor for `log_metrics`, which switches a tracker off
(`smalti.training.metrics`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar, cast

from smalti.errors import UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins.registry import Plugins
from smalti.rundir import Phase, Phases
from smalti.types import Outcome, RankInfo, RunInfo, RunState

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def notify_each(
    plugins: Plugins,
    hook: Callable[Concatenate[HookSpecs, RunState, P], None],
    state: RunState,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[Exception]:
    """Call a notify hook of every plugin, whatever the others do. Failures are reported with `warn`, and returned."""
    return _ask(plugins, hook, state, (), args, kwargs)[1]


def ask_each(
    plugins: Plugins,
    hook: Callable[Concatenate[HookSpecs, RunState, P], R | None],
    state: RunState,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> dict[str, R]:
    """The answers to a gather hook by plugin. A plugin that fails has none; its failure is reported with `warn`."""
    return _ask(plugins, hook, state, (), args, kwargs)[0]


def _ask(
    plugins: Plugins,
    hook: Callable[Concatenate[HookSpecs, RunState, ...], R | None],
    state: RunState,
    without: Collection[str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[dict[str, R], list[Exception]]:
    answers: dict[str, R] = {}
    failures: list[Exception] = []
    for name in plugins.implementers(hook):
        if name in without:
            continue
        try:
            answer = plugins.call_one(name, hook, state, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the isolation of observers: the other plugins are called whatever one raises
            failures.append(error)
            message = _failed(plugins, name, hook, error)
            if hook is HookSpecs.on_warning:
                _write(message, error)
            else:
                warn(plugins, state, f"{message}; the run is not affected", error)
        else:
            if answer is not None:
                answers[name] = answer
    return answers, failures


def lines_of_each(
    plugins: Plugins, hook: Callable[Concatenate[HookSpecs, P], list[str]], /, *args: P.args, **kwargs: P.kwargs
) -> list[str]:
    """The sentences of a gather hook of the launcher. A plugin that fails has none; its failure is logged."""
    found: list[str] = []
    for name in plugins.implementers(hook):
        try:
            found += plugins.call_one(name, hook, *args, **kwargs) or []
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises, the launch goes on
            _write(f"{_failed(plugins, name, hook, error)}; the launch is not affected", error)
    return found


def warn(plugins: Plugins, state: RunState, message: str, error: Exception, *, quiet: bool = False) -> None:
    """Report a failure that does not end the run: to the log, unless `quiet`, and to the observers.

    The log gets the traceback too, except for errors of the user or the system.
    """
    if not quiet:
        _write(message, error)
    notify_each(plugins, HookSpecs.on_warning, state, message=message, error=error)


def _failed(plugins: Plugins, name: str, hook: Callable[..., object], error: Exception) -> str:
    return f"plugin {name!r} ({plugins.infos[name].source}) failed in hook {hook.__name__!r}: {summary(error)}"


def _write(message: str, error: Exception) -> None:
    _log.warning("%s", message, exc_info=None if is_expected(error) else error)


def is_expected(error: BaseException) -> bool:
    """Whether an exception needs no traceback: an error of the user or of the system."""
    return isinstance(error, UserError | OSError)


def summary(error: BaseException) -> str:
    """Type and message of an exception; for a UserError the message and the fix."""
    if isinstance(error, UserError):
        return f"{error.message}; fix: {error.fix}" if error.fix else error.message
    text = f"{error}".partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def observed(plugins: Plugins, state: RunState, info: RunInfo) -> Iterator[list[Outcome]]:
    """Call `on_train_start`, `on_error` if an exception leaves the block, and always `on_train_end`, of every plugin.

    The block appends the outcome to the list. An exception in `on_train_start` is raised; `on_train_end` is then called for
    the plugins whose `on_train_start` has returned. Failures in `on_error` and `on_train_end` become notes on the exception.
    """
    ended: list[Outcome] = []
    unstarted: list[str] = []
    under_way: BaseException | None = None
    try:
        unstarted += plugins.implementers(HookSpecs.on_train_start)
        while unstarted:
            plugins.call_one(unstarted[0], HookSpecs.on_train_start, state, info=info)
            del unstarted[0]
        yield ended
    except BaseException as error:
        under_way = error
        _note(error, _ask(plugins, HookSpecs.on_error, state, unstarted, (), {"error": error})[1])
        raise
    finally:
        outcome = ended[0] if ended and under_way is None else None
        _note(under_way, _ask(plugins, HookSpecs.on_train_end, state, unstarted, (), {"outcome": outcome})[1])


@contextmanager
def rank_observed(plugins: Plugins, state: RunState, info: RankInfo, phases: Phases) -> Iterator[None]:
    """Call `on_rank_start`, `on_phase` for each phase of the block, and always `on_rank_end`, of every plugin."""
    error: BaseException | None = None
    phases.on_enter = lambda phase: _on_phase(plugins, state, phase)
    try:
        notify_each(plugins, HookSpecs.on_rank_start, state, info=info)
        if phases.current is not None:
            _on_phase(plugins, state, phases.current)
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        phases.on_enter = None
        notify_each(plugins, HookSpecs.on_rank_end, state, error=error)


def _on_phase(plugins: Plugins, state: RunState, phase: Phase) -> None:
    notify_each(plugins, HookSpecs.on_phase, state, phase=phase)


def _note(error: BaseException | None, failures: list[Exception]) -> None:
    for failure in failures if error is not None else ():
        text = ", ".join((summary(failure), *getattr(failure, "__notes__", ())))
        cast(BaseException, error).add_note(f"after that: {text}")
