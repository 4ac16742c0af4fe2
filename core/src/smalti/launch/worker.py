"""The process of one rank under a launcher. Started as `python -m smalti.launch.worker RUN_DIR`.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from smalti.config import Config, restore
from smalti.errors import ExitCode, UserError
from smalti.launch.plan import CHOSEN_VARIABLE, DIGEST_VARIABLE
from smalti.plugins import Plugins, Selection, load_plugins, schema_of
from smalti.rundir import RunDirectory
from smalti.system import (
    ProcessExit,
    Terminated,
    describe,
    die_with_parent,
    exit_code_of,
    hook_file,
    ignore_signals_after_command,
    ignore_write_errors,
    importing,
    keep_imports,
    launched,
    record_hook_in,
    write_exit_report,
)

_OPEN_FILES = 2**16
"""Enough for 10,000 ranks."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of a rank under a launcher. It reports how it ended in a file.

    A stop on request is exit status 0, whatever the exit code for the user: otherwise the launcher would take it for a failure
    and kill the other ranks.
    """
    end = ProcessExit()
    if arguments is None:  # else the caller continues in this process
        end = ProcessExit.install()
        ignore_signals_after_command()
        keep_imports()
        die_with_parent()
        _raise_open_files_limit()
    with importing():
        from torch.distributed.elastic.multiprocessing.errors import record

    ignore_write_errors()
    logging.basicConfig(format="smalti: %(message)s", level=logging.WARNING)
    try:
        record(_work)(Path((arguments or sys.argv[1:])[0]))
    except BaseException as error:
        end.code = _status(error)  # the teardown of C++ libraries may wait for other ranks
        raise
    end.code = 0


def _status(error: BaseException) -> int:
    """The exit status of a process that ends with this exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return int(ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED)


def _work(directory: Path) -> None:
    with importing():
        from smalti.launch.rank import run_rank

    try:
        with record_hook_in(hook_file() if launched() else None):
            outcome = run_rank(*load_run(directory))
    except BaseException as error:
        write_exit_report(exit_code_of(error), describe(error))
        if isinstance(error, UserError | Terminated):  # the launcher prints the message
            sys.exit(int(exit_code_of(error)))
        raise
    write_exit_report(outcome.exit_code, outcome.message)


def _raise_open_files_limit() -> None:
    """Raise the limit of open files to what the system allows, at most 65,536.

    Each gloo process group connects every rank with every other one, and a run has several groups. At some hundred ranks, the
    usual limit of 1,024 open files is too low.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # macOS enforces a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def load_run(directory: Path) -> tuple[Config, Plugins]:
    """Read the Config that the launcher resolved, with what it has chosen for these ranks, and load the same plugins.

    Raises UserError if this node has other plugins, or if another launch has replaced the files in the meantime.
    """
    run = RunDirectory(directory)
    waiting = run.next_of(run.launch_file)
    latest = waiting if waiting.exists() else run.launch_file
    launch: Mapping[str, Any] = json.loads(latest.read_text())
    if os.environ.get(DIGEST_VARIABLE, launch["digest"]) != launch["digest"]:
        raise UserError(
            f"another launch in {directory} has other options than this one",
            fix="give all nodes the same options; for another run, choose another --output_dir",
        )
    values = launch["values"]
    plugins = load_plugins(Selection(only=tuple(values["plugins"]), without=tuple(values["without"])))
    config = restore(schema_of(plugins), values, launch["user_accelerate"])
    if list(plugins.versions) != launch["plugins"]:
        raise UserError(
            f"this node has other plugins than the launcher: {', '.join(plugins.versions)}",
            fix=f"install the same plugins: {', '.join(launch['plugins'])}",
        )
    for name, (value, why) in json.loads(os.environ.get(CHOSEN_VARIABLE, "{}")).items():
        config = config.chosen(name, value, why)
    return config, plugins


if __name__ == "__main__":
    main()
