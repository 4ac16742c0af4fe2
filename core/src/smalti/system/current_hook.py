"""Record in a file which plugin hook this process is executing, to explain a process that was killed, aborted or hung.

Such a process cannot report anything itself: one that a collective call in a plugin aborted would look like one that ran out of
memory.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path

from smalti.system.streams import plugin_output

FILE_BYTES = 256
"""Size of the file."""


class _HookRecord:
    """The hook that runs in one thread of this process, that of the training loop. Hooks in other threads are not recorded."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.thread = 0
        self.text = b" " * FILE_BYTES

    def write(self, text: bytes) -> None:
        if self.thread != threading.get_ident():
            return
        self.text = text
        if self.file is not None:
            with suppress(OSError):  # a lost record must not end the run
                os.pwrite(self.file, text, 0)


_record = _HookRecord()


def current_hook() -> str:
    """The hook that the thread of the training loop executes, with its plugin; "" outside of hooks."""
    return _record.text.decode(errors="replace").partition("\n")[0].strip()


@contextmanager
def record_hook_in(path: Path | None) -> Iterator[None]:
    """Record the hook that this thread executes, also in the file at `path`, `FILE_BYTES` long, unless that is missing."""
    with ExitStack() as closing:
        closing.callback(vars(_record).update, file=None, thread=0)
        _record.thread = threading.get_ident()
        if path is not None and path.exists():
            file = os.open(path, os.O_WRONLY)
            closing.callback(os.close, file)
            _record.file = file
        yield


def record_hook(function: Callable[..., object], hook: str, *, fix: str) -> Callable[..., object]:
    """Wrap the implementation of a hook so that it is recorded while it runs. `functools.wraps` keeps tracebacks readable.

    `hook` names the hook and its plugin, `fix` says what to do if the plugin is the cause. Costs two writes to a cached page,
    less than two microseconds together. An exit in the hook is an error like any other: it must not end the process unsaved.
    """
    text = f"{hook}\n{fix}".encode()[:FILE_BYTES].ljust(FILE_BYTES)

    @wraps(function)
    def call(*arguments: object) -> object:
        outer = _record.text
        _record.write(text)
        try:
            with plugin_output():
                return function(*arguments)
        except SystemExit as error:
            message = f"the {hook} called sys.exit({error.code!r})"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error
        finally:
            _record.write(outer)

    return call
