"""A1, A2, A4: saves that are killed, that crash at a numbered operation, or that the system refuses."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

from smalti.checkpoint.async_saver import Saver
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.writer import SaveError, save
from smalti.system import files
from smalti.types import Checkpoint
from support.killing import kill_after

from .seam import publishes, through
from .subject import ALONE, Report, found, leftovers, snapshot

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


def in_child(action: Callable[[], None]) -> int:
    """Run in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(3)
    return os.waitpid(child, 0)[1]


def killed(chance: Random, place: Path) -> Report:
    """A1: a process that saves without end, synchronously or beside other work, gets SIGKILL at a random moment."""
    report, root = Report(), place / "checkpoints"
    size, keep, beside = chance.choice((1000, 60_000, 400_000)), chance.choice((None, 1, 2)), chance.random() < 0.5
    copy = chance.random() < 0.5
    step = 1
    for _ in range(10):
        acknowledged = _kill_once(root, step, chance.uniform(0, 0.06), size, keep, beside, copy)
        report.faults += 1
        now = found(root, size)
        report.expect(now is not None and now >= acknowledged, f"step {acknowledged} was acknowledged, step {now} is found")
        report.expect(len(leftovers(root)) <= 2, f"more than one save and one removal is left over: {leftovers(root)}")
        step = max(now or 0, acknowledged) + 1
    save(root, snapshot(step, size), ALONE)
    report.expect(not leftovers(root), f"the next save leaves {leftovers(root)}")
    return report


def _kill_once(root: Path, step: int, delay: float, size: int, keep: int | None, beside: bool, copy: bool) -> int:
    return kill_after(delay, lambda acknowledge: _save_for_ever(root, step, size, keep, beside, copy, acknowledge))


def _save_for_ever(
    root: Path, step: int, size: int, keep: int | None, beside: bool, copy: bool, acknowledge: Callable[[int], object]
) -> None:
    store = CheckpointStore(root)

    def write(state, communicator) -> Checkpoint:
        done = save(root, state, communicator, full_weights=copy)
        store.rotate(keep)
        return done

    saver = Saver(write=write, communicator=ALONE, background=ALONE)
    while True:
        live = snapshot(step, size)
        saver.begin(live, blocking=not beside)
        saver.wait_for_staging()
        if beside:
            for tensor in live.tensors().values():
                tensor.fill_(-7)
        saver.poll(finish=True)
        acknowledge(step)
        step += 1


def crashed(chance: Random, place: Path) -> Report:
    """A2: a save and the rotation after it, ended before, after and in the middle of each operation in turn.

    One outcome each: up to the rename that publishes, the step before is found; from then on, the new one.
    """
    report = Report()
    size, copy = chance.choice((1000, 20_000)), chance.random() < 0.5
    master = place / "master"
    for step in (1, 2):
        save(master, snapshot(step, size), ALONE)
    names: list[str] = []

    def count(name, original, *arguments):
        names.append("publish" if publishes(name, arguments) else name)
        return original(*arguments)

    rehearsal = shutil.copytree(master, place / "rehearsal")
    with through(count):
        _save_and_rotate(rehearsal, size, copy)
    publishing = names.index("publish")
    for number in range(len(names)):
        for mode in ("before", "middle", "after") if names[number] == "write" else ("before", "after"):
            root = shutil.copytree(master, place / f"{number}-{mode}")
            in_child(lambda root=root, number=number, mode=mode: _crash_at(root, size, copy, number, mode))
            report.faults += 1
            expected = 3 if number > publishing or (number == publishing and mode == "after") else 2
            now = found(root, size)
            report.expect(now == expected, f"crash {mode} operation {number}: step {now} is found, not {expected}")
            save(root, snapshot(9, size), ALONE)
            report.expect(not leftovers(root), f"crash {mode} operation {number}: the next save leaves {leftovers(root)}")
            shutil.rmtree(root)
    return report


def _save_and_rotate(root: Path, size: int, copy: bool) -> None:
    save(root, snapshot(3, size), ALONE, full_weights=copy)
    CheckpointStore(root).rotate(1)


def _crash_at(root: Path, size: int, copy: bool, number: int, mode: str) -> None:
    count = iter(range(10**9))

    def wrap(name, original, *arguments):
        if next(count) != number:
            return original(*arguments)
        if mode == "middle" and name == "write":
            file, data = arguments
            original(file, memoryview(data)[: len(data) // 2])
        elif mode == "after":
            original(*arguments)
        os._exit(0)

    with through(wrap):
        _save_and_rotate(root, size, copy)


def refused(chance: Random, place: Path) -> Report:
    """A4: the system refuses the n-th operation, once or from then on. Nothing older suffers, the next save works."""
    report, root = Report(), place / "checkpoints"
    save(root, snapshot(1), ALONE)
    good = 1
    for step in range(2, 14):
        number, code, once = chance.randrange(50), chance.choice(ERRORS), chance.random() < 0.5
        told = f"{errno.errorcode[code]} at operation {number}{'' if once else ' and after'}"
        before = good
        try:
            with through(_refusing(number, code, once)):
                save(root, snapshot(step), ALONE, full_weights=step % 2 == 0)
                CheckpointStore(root).rotate(2)
            good = step
        except SaveError as error:
            report.expect(error.errno == code, f"{told}: told as {error}")
            report.expect(bool(error.fix), f"{told}: nothing is said about what to do")
        except OSError as error:
            report.broken.append(f"{told}: not told as a failed save, but {error!r}")
        report.faults += 1
        now = found(root)
        report.expect(
            now is not None and before <= now <= step and now >= good, f"{told}: step {now} is found, {good} was good"
        )
        good = max(good, now or 0)
    save(root, snapshot(99), ALONE)
    report.expect((found(root), leftovers(root)) == (99, []), f"the next save finds {found(root)}, leaves {leftovers(root)}")
    if os.geteuid() == 0:
        _full_disk(chance, place, report)
    return report


def _refusing(number: int, code: int, once: bool):
    count = iter(range(10**9))

    def wrap(name, original, *arguments):
        now = next(count)
        if now == number or (now > number and not once):
            if name == "write":
                file, data = arguments
                original(file, memoryview(data)[: len(data) // 2])
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return original(*arguments)

    return wrap


def _full_disk(chance: Random, place: Path, report: Report) -> None:
    """A real file system that is too small; with its size hidden from the estimate, it fills up in the middle of a file."""
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        return
    free = files.free_bytes
    try:
        if chance.random() < 0.5:
            files.free_bytes = lambda path: None
        root, good = disk / "checkpoints", 0
        for step in range(1, 8):
            try:
                save(root, snapshot(step, 20_000), ALONE)
                good = step
            except SaveError as error:
                report.faults += 1
                report.expect(error.errno == errno.ENOSPC, f"a full disk is told as {error}")
                report.expect(found(root, 20_000) == good, f"a full disk: step {found(root, 20_000)} is found, not {good}")
                report.expect(not leftovers(root), f"a full disk: {leftovers(root)} take room")
                CheckpointStore(root).rotate(1)
        report.expect(good > 1, "no save worked again after room was made")
    finally:
        files.free_bytes = free
        subprocess.run(["umount", disk], check=True)
