"""Extensions that DeepSpeed compiles on a node at first use: one process at a time, without endless waiting.

torch creates an empty file `lock` in the build folder and removes it afterwards. A killed process leaves it there, and every
later process waits for it forever without a message. Here processes hold a lock that the kernel releases when they end, as
torch itself does from 2.15 on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

import psutil
import torch
from torch.utils.file_baton import FileBaton

from smalti import UserError
from smalti_deepspeed.startup import replaced

_LOCK = ".smalti-turn"
"""The file beside `lock` that the compiling process locks. It is not empty while that process holds torch's `lock`."""
_STILL_SECONDS = 600.0
"""If no file changes for so long, nobody is compiling: one source file takes a minute or two."""
_SILENT_SECONDS = 5.0
"""No message before this: loading a compiled extension takes less."""
_BUILDER = ">- DeepSpeed Op Builder: "
"""Prefix of some of DeepSpeed's messages."""
_log = logging.getLogger(__name__)


@contextmanager
def compiled_one_at_a_time() -> Iterator[None]:
    """Extensions that torch compiles and loads in this block are compiled by one process of the node at a time.

    Raises UserError if one cannot be compiled, or if another program seems to have been killed while compiling.
    """
    extension = import_module("torch.utils.cpp_extension")  # here, since it imports setuptools
    asked_once = replaced(import_module("cpuinfo"), "get_cpu_info", processor)
    try:
        quoted = shlex.quote(extension.TORCH_LIB_PATH)  # torch writes it unquoted into a command
        with replaced(extension, "TORCH_LIB_PATH", quoted), asked_once, ExitStack() as locked:
            if hasattr(extension, "FileBaton"):
                locked.enter_context(replaced(extension, "FileBaton", _Baton))
            yield
    except Exception as error:
        if (explained := _explained(error)) is None:
            raise
        raise explained from error


@cache
def processor() -> object:
    """What py-cpuinfo says of the processor. That starts other processes, and DeepSpeed asks twice for each extension."""
    return import_module("cpuinfo.cpuinfo").get_cpu_info()


def _explained(error: Exception) -> UserError | None:
    """The error with a fix for an extension that cannot be compiled; None for other errors."""
    cannot = "DeepSpeed cannot compile what this run needs"
    if isinstance(error, RuntimeError) and str(error).startswith("Error building extension"):
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "rror:" in line or "not found" in line), lines[-1])
        fix = "install a C++ compiler and Python's headers (g++, python3-dev), or remove offload_optimizer"
        return UserError(f"{cannot}: {reason.strip()}", fix=fix)
    builder = sys.modules.get("deepspeed.ops.op_builder.builder")  # there if one of its errors is
    if builder is None or not isinstance(error, builder.MissingCUDAException | builder.CUDAMismatchException):
        return None
    fix = (
        f"set CUDA_HOME to a CUDA toolkit (with nvcc) of version {torch.version.cuda}, for which torch was built; or remove "
        "what needs it: offloading to nvme, and DeepSpeed's own optimizers on accelerators"
    )
    return UserError(f"{cannot} with the CUDA toolkit of this node: {str(error).removeprefix(_BUILDER)}", fix=fix)


class _Baton(FileBaton):
    """torch's baton, acquired only while this process holds our lock. If it exists then, it is stale or of another program."""

    def try_acquire(self) -> bool:
        baton = Path(self.lock_file_path)
        with ExitStack() as kept:
            self._held = kept.enter_context(baton.with_name(_LOCK).open("a+b"))
            if _lock(self._held) and os.fstat(self._held.fileno()).st_size:  # its last owner was killed
                _await_compilers(baton.parent)
                baton.unlink(missing_ok=True)
            while not super().try_acquire():
                _await_others(baton)
            self._held.write(b"\n")
            self._held.flush()
            kept.pop_all()
        message = f"compiling {baton.parent.name} for DeepSpeed, once on this node; it takes a minute or two"
        self._notice = threading.Timer(_SILENT_SECONDS, _log.warning, [message])
        self._notice.daemon = True
        self._notice.start()
        return True

    def release(self) -> None:
        self._notice.cancel()
        super().release()
        self._held.truncate(0)
        self._held.close()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; returns False on file systems without locks, where only torch's own file protects."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _await_compilers(folder: Path) -> None:
    """Wait for compilers that a killed process has started on this node. Their working directory is the folder."""

    def works_here(process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(folder.resolve())
        except psutil.Error:
            return False

    psutil.wait_procs([process for process in psutil.process_iter() if works_here(process)], timeout=_STILL_SECONDS)


def _await_others(baton: Path) -> None:
    """Wait for a program that does not use our lock. Raises UserError if it no longer compiles."""
    _log.warning("waiting for another program that compiles in %s", baton.parent)
    while baton.exists():
        if time.time() - _last_change(baton.parent) > _STILL_SECONDS:
            raise UserError(
                f"a program began to compile in {baton.parent} and seems to have been killed: nothing has changed there for "
                f"{_STILL_SECONDS / 60:.0f} minutes",
                fix=f"check that no other program compiles there, then: rm {baton}",
            )
        time.sleep(0.1)


def _last_change(folder: Path) -> float:
    """The time of the last change of a file in a folder, in seconds since 1970; 0 without files."""
    times = [0.0]
    with os.scandir(folder) as entries:
        for each in entries:
            with suppress(FileNotFoundError):
                times.append(0.0 if each.name == _LOCK else each.stat(follow_symlinks=False).st_mtime)
    return max(times)
