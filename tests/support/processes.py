"""Questions and signals to processes that may end at any moment: one that has ended is no error."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


def living(processes: Iterable[psutil.Process], *, within: float = 0) -> list[psutil.Process]:
    """Those that have not ended `within` seconds from now. A zombie has."""
    deadline, left = time.monotonic() + within, list(processes)
    while True:
        left = [each for each in left if _lives(each)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def lives(pid: int) -> bool:
    try:
        return bool(living([psutil.Process(pid)]))
    except psutil.NoSuchProcess:
        return False


def commands(processes: Iterable[psutil.Process]) -> list[tuple[psutil.Process, list[str]]]:
    """Those that have not ended, each with its command line."""
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            found.append((each, each.cmdline()))
    return found


def workers(pid: int) -> dict[int, psutil.Process]:
    """The processes of the ranks below a launcher, by rank."""
    found = {}
    for each, words in commands(psutil.Process(pid).children(recursive=True)):
        if "smalti.launch.worker" in words and "smalti.launch.agent" not in words:
            with suppress(psutil.NoSuchProcess):
                found[int(each.environ()["RANK"])] = each
    return found


def send_signal(number: int, processes: Iterable[psutil.Process]) -> None:
    """To each that has not ended."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
