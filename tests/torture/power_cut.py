"""A3: the power fails. What was done is written down, then played again up to some point, without what was not synced."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.writer import save

from .seam import through
from .subject import ALONE, Report, found, snapshot

BLOCK = 4096
SIZE = 3000
Entry = tuple
"""One operation of the log: its name, then its arguments; files by their path at creation, ("done", step) between."""

MISSING = {
    "a file is not synced": lambda name, path: name == "sync" and path.suffix == ".safetensors",
    "the state is not synced": lambda name, path: name == "sync" and path.name == "state.json",
    "the manifest is not synced": lambda name, path: name == "sync" and path.suffix == ".tmp",
    "a directory of tensors is not synced": lambda name, path: name == "fsync_directory" and path.name == "model",
    "the directory of the copy for other tools is not synced": lambda name, path: (
        name == "fsync_directory" and path.name == "weights"
    ),
    "the new directory is not synced": lambda name, path: name == "fsync_directory" and path.name.startswith(".partial"),
    "the store is not synced": lambda name, path: name == "fsync_directory" and path.name == "checkpoints",
}
"""Ways to break the saving, each of which these tests must notice."""


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    """`pending` are changes of names since the last sync: (name that goes or None, name that comes or None, what it is)."""

    entries: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def change(self, goes: str | None, comes: str | None, what: object) -> None:
        self.pending.append((goes, comes, what))
        _change(self.entries, goes, comes, what)


def _change(entries: dict, goes: str | None, comes: str | None, what: object) -> None:
    if goes is not None:
        entries.pop(goes, None)
    if comes is not None:
        entries[comes] = what


def record(place: Path, without=None) -> list[Entry]:
    """The operations of some saves and rotations below `place`, less those for which without(name, path) holds."""
    log: list[Entry] = []

    def wrap(name, original, *arguments):
        path = Path(arguments[0].name) if isinstance(arguments[0], io.FileIO) else arguments[0]
        if without is not None and without(name, path):
            return None
        if name == "write":
            log.append((name, path, bytes(arguments[1])))
        else:
            log.append((name, path, *arguments[1:]))
        return original(*arguments)

    root = place / "checkpoints"
    root.mkdir()
    with through(wrap):
        for step in range(1, 6):
            save(root, snapshot(step, SIZE), ALONE, full_weights=True)
            log.append(("done", step))
            CheckpointStore(root).rotate(2)
    return log


def play(log: list[Entry], place: Path) -> Folder:
    """The disk after these operations: what is there, and what of it is safe."""
    top = Folder()
    top.entries["checkpoints"] = top.synced["checkpoints"] = Folder()
    opened: dict[Path, File] = {}

    def at(path: Path):
        node = top
        for part in path.relative_to(place).parts:
            node = node.entries[part]
        return node

    for name, *arguments in log:
        if name == "done":
            continue
        path = arguments[0]
        if name == "create":
            opened[path] = File()
            at(path.parent).change(None, path.name, opened[path])
        elif name == "write":
            opened[path].data += arguments[1]
        elif name == "sync":
            opened[path].synced = bytes(opened[path].data)
        elif name == "make_directory":
            at(path.parent).change(None, path.name, Folder())
        elif name == "rename":
            at(path.parent).change(path.name, arguments[1].name, at(path))
        elif name in ("remove_file", "remove_directory"):
            at(path.parent).change(path.name, None, None)
        elif name == "fsync_directory":
            folder = at(path)
            folder.synced, folder.pending = dict(folder.entries), []
    return top


def survive(folder: Folder, place: Path, chance: Random, mode: str) -> None:
    """Write what the power cut leaves: of what was not synced none, all, or some, files torn at a block."""
    place.mkdir()
    entries = dict(folder.entries if mode == "all" else folder.synced)
    if mode == "some":
        for change in folder.pending:
            if chance.random() < 0.5:
                _change(entries, *change)
    for name, node in entries.items():
        if isinstance(node, Folder):
            survive(node, place / name, chance, mode)
        else:
            (place / name).write_bytes(_torn(node, chance, mode))


def _torn(file: File, chance: Random, mode: str) -> bytes:
    if mode != "some":
        return bytes(file.data) if mode == "all" else file.synced
    data = bytearray(file.data[: len(file.synced) + BLOCK * chance.randrange(8)])
    for start in range(len(file.synced), len(data), BLOCK):
        if chance.random() < 0.3:
            data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))
    return bytes(data)


def lost(log: list[Entry], source: Path, place: Path, chance: Random) -> str:
    """Cut the power once at a random point; what was lost, or ""."""
    cut, mode = chance.randrange(len(log) + 1), chance.choice(("none", "all", "some", "some"))
    done = max([0, *(entry[1] for entry in log[:cut] if entry[0] == "done")])
    survive(play(log[:cut], source), place, chance, mode)
    now = found(place / "checkpoints", SIZE)
    shutil.rmtree(place)
    return "" if (now or 0) >= done else f"power cut at operation {cut}, {mode} of the rest kept: step {now}, not {done}"


def power_cut(chance: Random, place: Path) -> Report:
    """A3: the last acknowledged step is found after every cut; and a saving that forgets to sync is found out."""
    report = Report()
    log = record(place / _made(place, "sound"))
    for _ in range(100):
        report.faults += 1
        if told := lost(log, place / "sound", place / "after", chance):
            report.broken.append(told)
    name = chance.choice(list(MISSING))
    broken = place / _made(place, "broken")
    log = record(broken, MISSING[name])
    caught = any(lost(log, broken, place / "after", chance) for _ in range(150))
    report.expect(caught, f"nobody notices that {name}")
    return report


def _made(place: Path, name: str) -> str:
    (place / name).mkdir()
    return name
