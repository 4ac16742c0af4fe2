"""One of the processes that `smalti_testing.ranks` starts: it takes functions off a line and sends back what they gave."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType
from typing import cast

Order = tuple[str, str, str, tuple[object, ...], dict[str, object]]
"""Module, qualified name and file of a function, and its arguments."""


def main(descriptor: int, group: bool) -> None:
    """Call functions until the other end asks to stop."""
    faulthandler.register(signal.SIGUSR1)
    line = Connection(descriptor)
    orders: SimpleQueue[Order | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, orders), daemon=True).start()
    if group:
        import torch.distributed as dist  # which a function without a group may not need

        dist.init_process_group("gloo")
    line.send((None, ""))
    while (order := orders.get()) is not None:
        _send(line, _call(order))
    joined = sys.modules.get("torch.distributed")  # by this or by a function
    if joined is not None and joined.is_initialized():
        joined.destroy_process_group()


def _listen(line: Connection, orders: SimpleQueue[Order | None]) -> None:
    """Queue orders. When the process that sends them ends, this one must end too, whatever it is waiting for."""
    while True:
        try:
            order = line.recv()
        except (EOFError, OSError):
            os._exit(1)
        orders.put(order)
        if order is None:
            return


def _call(order: Order) -> tuple[object, str]:
    module, name, file, arguments, keywords = order
    try:
        return _find(module, name, file)(*arguments, **keywords), ""
    except (Exception, SystemExit):  # noqa: BLE001 - reported to the other end, whatever it is
        return None, traceback.format_exc()


def _send(line: Connection, answer: tuple[object, str]) -> None:
    try:
        line.send(answer)
    except Exception:  # noqa: BLE001 - a value's own code decides what pickling it raises
        line.send((None, f"the answer cannot be sent:\n{traceback.format_exc()}"))


def _find(module: str, name: str, file: str) -> Callable[..., object]:
    """The function, from its module if that can be imported here, else from its file under the module's name."""
    found: object = _import(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    return cast(Callable[..., object], found)


def _import(module: str, file: str) -> ModuleType:
    if (known := sys.modules.get(module)) is not None and getattr(known, "__file__", None) == file:
        return known
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == file:
        return import_module(module)
    # A script must not run again here: under another name, what it does `if __name__ == "__main__"` stays undone.
    spec = spec_from_file_location("__script__" if module == "__main__" else module, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    sys.modules[module] = loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "group")
