"""What DeepSpeed compiles on a machine when it is first needed: in turn, and never waited for without end.

torch marks the folder it compiles in with an empty file, `lock`, and removes it afterwards. A process that is killed leaves it
there, and every later one waits on it for ever, saying nothing. Here each takes a turn that the kernel ends with the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO

import psutil
import torch
from torch.utils.file_baton import FileBaton

from smalti import UserError
from smalti_deepspeed.startup import replaced

_TURN = ".smalti-turn"
"""Beside `lock`: locked by the process that compiles, and not empty while it has torch's mark."""
_STILL_SECONDS = 600.0
"""A folder in which nothing changes for so long is not being compiled in: one source takes a minute or two."""
_SILENT_SECONDS = 5.0
"""Loading what was compiled before takes less."""
_BUILDER = ">- DeepSpeed Op Builder: "
"""What some of DeepSpeed's messages begin with."""
_log = logging.getLogger(__name__)


@contextmanager
def compiled_in_turn() -> Iterator[None]:
    """Whatever torch compiles and loads in this block, it does so in turn with all that use this.

    Raises UserError when it cannot be compiled, or when a program other than this one seems to have died compiling.
    """
    extension = import_module("torch.utils.cpp_extension")  # here, since it imports setuptools
    try:
        with replaced(extension, "FileBaton", _Turn):
            yield
    except Exception as error:
        if (explained := _explained(error)) is None:
            raise
        raise explained from error


def _explained(error: Exception) -> UserError | None:
    """What to do about something that cannot be compiled; None for other errors."""
    cannot = "DeepSpeed cannot compile what this run needs"
    if isinstance(error, RuntimeError) and str(error).startswith("Error building extension"):
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "rror:" in line or "not found" in line), lines[-1])
        fix = "install a C++ compiler and Python's headers (g++, python3-dev), or leave out offload_optimizer"
        return UserError(f"{cannot}: {reason.strip()}", fix=fix)
    builder = sys.modules.get("deepspeed.ops.op_builder.builder")  # there if one of its errors is
    if builder is None or not isinstance(error, builder.MissingCUDAException | builder.CUDAMismatchException):
        return None
    fix = (
        f"set CUDA_HOME to a CUDA toolkit (with nvcc) of version {torch.version.cuda}, for which torch was built; or leave out "
        "what needs it: offloading to nvme, and DeepSpeed's own optimizers on accelerators"
    )
    return UserError(f"{cannot} with the CUDA toolkit of this machine: {str(error).removeprefix(_BUILDER)}", fix=fix)


class _Turn(FileBaton):
    """torch's own baton, taken only by who has the turn: it is free then, or nobody of ours will ever free it."""

    def try_acquire(self) -> bool:
        mark = Path(self.lock_file_path)
        with ExitStack() as kept:
            self._turn = kept.enter_context(mark.with_name(_TURN).open("a+b"))
            if _lock(self._turn) and os.fstat(self._turn.fileno()).st_size:  # who had it was killed
                _await_compilers(mark.parent)
                mark.unlink(missing_ok=True)
            while not super().try_acquire():
                _await_others(mark)
            self._turn.write(b"\n")
            self._turn.flush()
            kept.pop_all()
        message = f"compiling {mark.parent.name} for DeepSpeed, once on this machine; it takes a minute or two"
        self._notice = threading.Timer(_SILENT_SECONDS, _log.warning, [message])
        self._notice.daemon = True
        self._notice.start()
        return True

    def release(self) -> None:
        self._notice.cancel()
        super().release()
        self._turn.truncate(0)
        self._turn.close()


def _lock(file: IO[bytes]) -> bool:
    """Whether it is this process's now; not so on file systems without locks, where torch's mark is all there is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _await_compilers(folder: Path) -> None:
    """Until those have ended that a killed process has started on this machine. They work in the folder itself."""

    def works_here(process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(folder.resolve())
        except psutil.Error:
            return False

    psutil.wait_procs([process for process in psutil.process_iter() if works_here(process)], timeout=_STILL_SECONDS)


def _await_others(mark: Path) -> None:
    """Until the mark of a program that takes no turns is gone. Raises UserError when that compiles no more."""
    _log.warning("waiting for another program that compiles in %s", mark.parent)
    while mark.exists():
        if time.time() - _last_change(mark.parent) > _STILL_SECONDS:
            raise UserError(
                f"a program began to compile in {mark.parent} and seems to have been killed: nothing has changed there for "
                f"{_STILL_SECONDS / 60:.0f} minutes",
                fix=f"see that none runs, then: rm {mark}",
            )
        time.sleep(0.1)


def _last_change(folder: Path) -> float:
    """When a program wrote a file here, in seconds since 1970."""
    times = [0.0]
    with os.scandir(folder) as entries:
        for each in entries:
            with suppress(FileNotFoundError):
                times.append(0.0 if each.name == _TURN else each.stat(follow_symlinks=False).st_mtime)
    return max(times)
