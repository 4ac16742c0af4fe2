"""The runs below some folders, found by their run.json. Looking again costs one system call for each folder without news."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from smalti import UserError
from smalti.rundir import RunDirectory, Summary

DEPTH = 4
_SETTLED_SECONDS = 3.0
"""A folder that was changed less than this before it was read may change again without another time of change."""
_SECONDS = 1.0
"""How often the folders are looked at, at most."""
_READ = re.compile(r"(control|heartbeat|.*\.(json|jsonl|toml|yaml|log))")
"""What is read or written of a run directory by name: none of it may be a link that leaves the roots."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,80}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run. `id` is that of run.json; a copy of a run directory has the digest of its path added to it."""

    id: str
    name: str
    begun: float
    directory: RunDirectory

    @property
    def path(self) -> Path:
        return self.directory.path


@dataclass(kw_only=True)
class _Folder:
    changed: int
    settled: bool
    folders: tuple[str, ...] = ()
    run: FoundRun | None = None


class RunIndex:
    """Finds runs. Thread-safe. Links to folders are not followed."""

    def __init__(self, roots: Sequence[Path], depth: int = DEPTH) -> None:
        self._roots = [root.resolve() for root in roots]
        self._depth = depth
        self._folders: dict[Path, _Folder] = {}
        self._runs: dict[str, FoundRun] = {}
        self._summaries: dict[str, tuple[object, Summary]] = {}
        self._looked = -_SECONDS
        self._lock = threading.Lock()
        self.folders_read = 0
        """How many folders have been read: the cost of looking."""

    def runs(self) -> list[FoundRun]:
        """All runs, the one that began last first."""
        with self._lock:
            self._look()
            return sorted(self._runs.values(), key=lambda run: (run.begun, run.id), reverse=True)

    def find(self, run_id: str) -> FoundRun | None:
        """The run with this id, None if there is none."""
        with self._lock:
            if run_id not in self._runs or not self._runs[run_id].directory.record_file.exists():
                self._look(now=True)
            else:
                self._look()
            return self._runs.get(run_id)

    def place(self, run: FoundRun) -> str:
        """The path of a run below the root that has it; its whole path with several roots."""
        if len(self._roots) == 1 and run.path != self._roots[0]:
            return str(run.path.relative_to(self._roots[0]))
        return str(run.path)

    def summary(self, run: FoundRun) -> Summary | None:
        """The run in one row. That of a run that has ended is kept until something changes."""
        stamp = _stamp(run.directory)
        known = self._summaries.get(run.id)
        if known is not None and known[0] == stamp and known[1].status.ended:
            return known[1]
        try:
            found = run.directory.summary()
        except (UserError, OSError) as error:
            _log.warning("%s: %s", run.path, error)
            return None
        if found is not None:
            self._summaries[run.id] = stamp, found
        return found

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._looked < _SECONDS:
            return
        before, self._folders = self._folders, {}
        for root in self._roots:
            self._visit(root, self._depth, before)
        self._runs = {}
        for path in sorted(self._folders):
            run = self._folders[path].run
            if run is None:
                continue
            if run.id in self._runs:
                run = FoundRun(id=f"{run.id}-{_digest(path)}", name=run.name, begun=run.begun, directory=run.directory)
            self._runs[run.id] = run
        self._looked = time.monotonic()

    def _visit(self, path: Path, depth: int, before: dict[Path, _Folder]) -> None:
        if path in self._folders:  # one root inside another
            return
        try:
            changed = path.stat().st_mtime_ns
            folder = before.get(path)
            if folder is None or folder.changed != changed or not folder.settled:
                folder = self._read(path, changed, folder)
        except OSError as error:
            _log.debug("skipped: %s", error)
            return
        self._folders[path] = folder
        if folder.run is None and depth > 0:
            for name in folder.folders:
                self._visit(path / name, depth - 1, before)

    def _read(self, path: Path, changed: int, before: _Folder | None) -> _Folder:
        self.folders_read += 1
        settled = time.time() - changed / 1e9 > _SETTLED_SECONDS
        with os.scandir(path) as entries:
            listed = list(entries)
        names = {entry.name for entry in listed}
        if "run.json" in names:
            outside = [entry.name for entry in listed if entry.is_symlink() and _READ.fullmatch(entry.name)]
            outside = [name for name in outside if not self._is_inside(path / name)]
            if outside:
                _log.warning("%s is not shown: %s leaves the folders of the page", path, ", ".join(outside))
                return _Folder(changed=changed, settled=settled)
            run = _run_at(path, before.run if before else None)
            if run is not None:
                return _Folder(changed=changed, settled=settled, run=run)
        folders = (entry.name for entry in listed if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
        return _Folder(changed=changed, settled=settled, folders=tuple(sorted(folders)))

    def _is_inside(self, path: Path) -> bool:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError):
            return False
        return any(resolved.is_relative_to(root) for root in self._roots)


def _run_at(path: Path, before: FoundRun | None) -> FoundRun | None:
    """The run whose directory this is. Its object stays the same, because it remembers what it has seen of the heartbeat."""
    directory = before.directory if before else RunDirectory(path)
    try:
        record = directory.record()
    except (UserError, OSError) as error:
        _log.warning("skipped: %s", error)
        return None
    if record is None:
        return None
    run_id = record.id if _PLAIN_ID.fullmatch(record.id) else _digest(path)
    return FoundRun(id=run_id, name=record.name, begun=record.started or record.created, directory=directory)


def _stamp(directory: RunDirectory) -> object:
    """What changes whenever the summary of a run that has ended could change."""
    return tuple(_stamp_of(path) for path in (directory.record_file, directory.events_file, directory.heartbeat_file))


def _stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _digest(path: Path) -> str:
    return sha256(os.fsencode(path)).hexdigest()[:8]
