"""Which hook of which plugin this process is in, kept in a file: for who finds the process killed, aborted or hanging.

A process that ends so can say nothing itself. One that a collective call of a plugin has aborted would look like one that ran
out of memory.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path

FILE_BYTES = 256
"""Bytes of the file."""


class _Note:
    """Of one thread of this process, in which the loop is. Hooks that other threads call are not recorded."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.thread = 0
        self.text = b" " * FILE_BYTES

    def wanted(self) -> bool:
        return self.file is not None and self.thread == threading.get_ident()

    def write(self, text: bytes) -> None:
        self.text = text
        if self.file is not None:
            with suppress(OSError):  # it is no reason to fail
                os.pwrite(self.file, text, 0)


_note = _Note()


@contextmanager
def record_hook_in(path: Path) -> Iterator[None]:
    """Note in this file, which has `FILE_BYTES` bytes, what this thread is in; nowhere if there is no such file."""
    with ExitStack() as closing:
        with suppress(FileNotFoundError):
            file = os.open(path, os.O_WRONLY)
            closing.callback(os.close, file)
            closing.callback(setattr, _note, "file", None)
            _note.file, _note.thread = file, threading.get_ident()
        yield


def record_hook(function: Callable[..., object], hook: str, *, fix: str) -> Callable[..., object]:
    """Wrap the implementation of a hook so that it is recorded while it runs. `functools.wraps` keeps tracebacks readable.

    `hook` names the hook and its plugin, `fix` says what to do if the plugin is the cause. Costs two writes to a cached page,
    less than two microseconds together.
    """
    own = f"{hook}\n{fix}".encode()[:FILE_BYTES].ljust(FILE_BYTES)

    @wraps(function)
    def call(*arguments: object) -> object:
        if not _note.wanted():
            return function(*arguments)
        outer = _note.text
        _note.write(own)
        try:
            return function(*arguments)
        finally:
            _note.write(outer)

    return call
