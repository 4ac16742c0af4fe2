"""The operations of `smalti.system.files`, watched, counted and made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smalti.system import files

OPERATIONS = ("create", "write", "sync", "fsync_directory", "rename", "make_directory", "remove_file", "remove_directory")

Wrap = Callable[..., object]
"""wrap(name, original, *arguments): called in the place of an operation."""


@contextmanager
def through(wrap: Wrap) -> Iterator[None]:
    """Every operation goes through `wrap`, one at a time, whichever thread it comes from."""
    turn = threading.RLock()
    originals = {name: getattr(files, name) for name in OPERATIONS}

    def stand_in(name: str) -> Callable[..., object]:
        def operation(*arguments: object) -> object:
            with turn:
                return wrap(name, originals[name], *arguments)

        return operation

    for name in OPERATIONS:
        setattr(files, name, stand_in(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(files, name, original)


def publishes(name: str, arguments: tuple) -> bool:
    """Whether this operation is the one by which a checkpoint becomes visible."""
    return name == "rename" and arguments[0].name.startswith(".partial-")
