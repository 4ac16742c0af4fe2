"""The directory of a run's checkpoints: list them, choose one, publish a new one, remove old ones.

A checkpoint is made in a hidden directory and becomes visible by one rename, so a crash at any time leaves a complete
checkpoint or none. A published directory is never written to again: if a step is saved again (a run that resumed from an
earlier step), the new checkpoint has another directory, `step-00000500.2`, and takes precedence.

One process at a time, usually rank 0, may change a store. Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from smalti.checkpoint.format.manifest import GROUPS, MANIFEST, SUSPECT, Manifest, read_manifest
from smalti.checkpoint.format.verification import Verification, files_in, verify
from smalti.errors import CheckpointError
from smalti.system import files

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFTOVER_NAME = re.compile(rf"\.(?:partial|removed)-{_NAME.pattern}-[0-9a-f]{{8}}")
_CHOICE = re.compile(r"(?:step-)?(\d+)")
_LOCK = ".lock"
_LOCK_SECONDS = 5.0
RANKING = "ranking.json"
"""The file in the directory that ranks evaluated steps: `{"keep": 1, "steps": [500, 300]}`, the best first. `keep` of them are
not removed. Whoever evaluates writes it, and may write more into it."""

Check = Callable[[Path], Verification]
"""Verifies a checkpoint, as `verify` does."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One directory with the name of a checkpoint. `problem` is why its manifest cannot be used; "" if it can.

    `revision` is 1, and greater if the step was saved again later.
    """

    step: int
    revision: int
    path: Path
    manifest: Manifest | None
    problem: str

    @property
    def suspect(self) -> bool:
        return self.manifest is not None and SUSPECT in self.manifest.flags


class CheckpointStore:
    """The checkpoints in one directory. `report` is called with messages about what was skipped or failed."""

    def __init__(self, root: Path, *, report: Callable[[str], None] | None = None) -> None:
        self.root = root
        self._report = report or (lambda _sentence: None)
        self._known: dict[Path, tuple[object, Verification]] = {}

    # --- reading ----------------------------------------------------------------------------------------------------

    def all(self) -> list[Entry]:
        """Returns every checkpoint directory, lowest step first. Reads manifests only; an empty list without a root."""
        return sorted(map(read_entry, self._directories()), key=lambda entry: (entry.step, entry.revision))

    def names(self) -> frozenset[str]:
        """Returns the names of all checkpoint directories."""
        return frozenset(path.name for path in self._directories())

    def _directories(self) -> list[Path]:
        try:
            return [path for path in self.root.iterdir() if parse_checkpoint_name(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def latest(self) -> Path | None:
        """Returns the complete checkpoint of the highest step, verified by digest; None if there is none.

        A suspect one only if there is no other.
        """
        return next((entry.path for entry in self._preferred() if self._check(entry).ok), None)

    def _preferred(self) -> list[Entry]:
        """The checkpoints, the newest first, but suspect ones after all others."""
        return sorted(self.all(), key=lambda entry: (not entry.suspect, entry.step, entry.revision), reverse=True)

    def ranked(self) -> tuple[list[Entry], int]:
        """Returns the checkpoints that were evaluated, the best first, without suspect ones, and how many are to be kept.

        Raises CheckpointError if the ranking is damaged.
        """
        try:
            steps, keep = decode_ranking(files.read_regular(self.root / RANKING), str(self.root))
        except FileNotFoundError:
            return [], 0
        there = {entry.step: entry for entry in self.all() if entry.manifest and not entry.suspect}
        return [there[step] for step in steps if step in there], keep

    def resolve(self, choice: str, *, check: Check = verify) -> Path | None:
        """Returns the checkpoint of `--resume_from_checkpoint`, verified by `check`.

        "none" is None. "latest" is the newest complete one (a suspect one only if there is no other), and None only if none
        was ever saved. "best" is the complete one with the best evaluation. "500" or "step-500" is a
        step of this store. Anything else is the path of a checkpoint, or of a run directory for its newest complete one.
        Raises CheckpointError if the checkpoint does not exist or is not complete.
        """
        if choice == "none":
            return None
        if choice == "latest":
            return self._newest(check) if self.all() else None
        if choice == "best":
            for entry in self.ranked()[0]:
                if self._check(entry, check).ok:
                    return entry.path
            raise CheckpointError(f"no checkpoint in {self.root} was evaluated", fix='name a step, or "latest"')
        if match := _CHOICE.fullmatch(choice):
            return self._of_step(int(match[1]), check)
        path = Path(choice).expanduser()
        if (path / MANIFEST).exists() or (path.is_dir() and _NAME.fullmatch(path.name)):
            if not (result := check(path)).ok:
                raise _unusable_error(result)
            return path
        for root in (path / "checkpoints", path):
            if (store := CheckpointStore(root, report=self._report)).all():
                return store._newest(check)
        raise CheckpointError(
            f"{choice} is neither a checkpoint nor a run directory with checkpoints",
            fix='use a step, the path of a checkpoint or of a run directory, "latest", "best" or "none"',
        )

    def _newest(self, check: Check) -> Path:
        results = []
        for entry in self._preferred():
            results.append(self._check(entry, check))
            if results[-1].ok:
                self._report_suspects(entry)
                return entry.path
        raise CheckpointError(
            "\n  ".join([f"no checkpoint in {self.root} can be used:", *(map(_summary, results))]),
            fix="restore the missing files, or start over with --resume_from_checkpoint none",
        )

    def _report_suspects(self, chosen: Entry) -> None:
        """Say which newer checkpoints were passed over for this one."""
        if chosen.suspect:
            self._report(f"{chosen.path.name} was saved after a fault of an accelerator and may be corrupt; there is no other")
        elif newer := [entry for entry in self.all() if entry.suspect and entry.step > chosen.step]:
            self._report(
                f"{newer[-1].path.name} was saved after a fault of an accelerator and may be corrupt, so {chosen.path.name} "
                f"is used; to use the other one, --resume_from_checkpoint={newer[-1].step}"
            )

    def _of_step(self, step: int, check: Check) -> Path:
        entries = self.all()
        results = []
        for entry in reversed(entries):
            if entry.step == step:
                results.append(self._check(entry, check))
                if results[-1].ok:
                    return entry.path
        if results:
            raise _unusable_error(results[0])
        there = ", ".join(map(str, sorted({entry.step for entry in entries}))) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {self.root}", fix=f"there are: {there}")

    def _check(self, entry: Entry, check: Check = verify) -> Verification:
        """Read all of a checkpoint, remember the outcome, report what is wrong."""
        fingerprint = _fingerprint(entry.path)
        known = Verification(path=entry.path, manifest=None, problems=(entry.problem,)) if entry.problem else None
        result = known or check(entry.path)
        self._known[entry.path] = fingerprint, result
        if not result.ok:
            self._report(f"skipped {_summary(result)}")
        return result

    # --- writing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the store for one save, and remove what crashed saves and unfinished removals have left.

        Raises CheckpointError if another process is saving here. The lock ends with the process; after a kill that can take a
        moment.
        """
        for path in reversed((self.root, *self.root.parents)):
            if not path.exists():
                path.mkdir(exist_ok=True)
                files.fsync_directory(path.parent)
        with (self.root / _LOCK).open("ab") as file:
            try:
                _lock(file)
            except BlockingIOError:
                raise CheckpointError(
                    f"another process is saving into {self.root}", fix="use a separate --output_dir for every run"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                # Without locks a leftover may belong to a running process, so none is removed.
                self._report(f"{self.root} is on a file system without locks: unfinished saves are not removed")
                yield
                return
            self._clear_leftovers()
            yield

    def prepare(self, step: int) -> Path:
        """Returns a new hidden directory for a checkpoint, with a sub-directory for each group of tensors."""
        partial = self.root / f".partial-{checkpoint_name(step)}-{secrets.token_hex(4)}"
        for path in (partial, *(partial / group for group in GROUPS)):
            files.make_directory(path)
        return partial

    def publish(self, partial: Path, manifest: Manifest, *, confirm: Callable[[], None] = lambda: None) -> Path:
        """Turn a finished directory into a checkpoint; returns its path. Its files must have been synced.

        `confirm` is called right before it becomes visible, and prevents that by an exception.

        If the newest checkpoint of this step is complete and has the same contents, removes `partial` and returns that one.
        """
        for group in GROUPS:
            if any(name.startswith(f"{group}/") for name in manifest.files):
                files.fsync_directory(partial / group)
            else:
                files.remove_directory(partial / group)
        older = [entry for entry in self.all() if entry.step == manifest.step]
        newest = older[-1] if older else None
        if newest and newest.manifest and newest.manifest.holds_the_same_as(manifest) and verify(newest.path).ok:
            self.discard(partial)
            return newest.path
        files.atomic_write(partial / MANIFEST, manifest.encode())
        path = self.root / checkpoint_name(manifest.step, newest.revision + 1 if newest else 1)
        confirm()
        files.rename(partial, path)
        files.fsync_directory(self.root)
        return path

    def discard(self, partial: Path) -> None:
        """Remove a directory that `prepare` made. What cannot be removed is reported; the next save tries again."""
        try:
            files.remove_tree(partial)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._report(f"cannot remove {error.filename}: {error.strerror}")

    def rotate(self, keep: int | None) -> list[Path]:
        """Remove all but the newest `keep` complete checkpoints (None: remove nothing); returns what was removed.

        The best ones stay too, as many as the ranking says. Suspect checkpoints do not count. An incomplete directory is never
        removed: its files may be the only copy. Contents are verified once in the life of this object, and again if a file has
        changed. Raises CheckpointError, and removes nothing, if the ranking is damaged.
        """
        if keep is None:
            return []
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        ranked, best = self.ranked()
        protected = set(islice((entry.path for entry in ranked if self._still_valid(entry)), best))
        kept: set[int] = set()
        removed = []
        for entry in reversed(self.all()):
            if entry.manifest is None or not self._still_valid(entry):
                continue
            if len(kept) < keep and entry.step not in kept:
                if not entry.suspect:
                    kept.add(entry.step)
            elif entry.path not in protected and self._remove(entry.path):
                removed.append(entry.path)
        return removed

    def _still_valid(self, entry: Entry) -> bool:
        fingerprint, result = self._known.get(entry.path, (None, None))
        if result is None or fingerprint != _fingerprint(entry.path):
            result = self._check(entry)
        return result.ok

    def _remove(self, path: Path) -> bool:
        """Rename to a hidden name first, so that no incomplete checkpoint is ever visible."""
        hidden = self.root / f".removed-{path.name}-{secrets.token_hex(4)}"
        try:
            files.rename(path, hidden)
            files.fsync_directory(self.root)
        except OSError as error:
            self._report(f"cannot remove {path}: {error.strerror}")
            return False
        self._known.pop(path, None)
        self.discard(hidden)
        return True

    def _clear_leftovers(self) -> None:
        for path in self.root.iterdir():
            if _LEFTOVER_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                self.discard(path)


def _lock(file: BinaryIO) -> None:
    """Raises BlockingIOError if another process holds the lock for longer than a dying process would."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def checkpoint_name(step: int, revision: int = 1) -> str:
    """The name of the directory of a checkpoint."""
    return f"step-{step:08d}" if revision == 1 else f"step-{step:08d}.{revision}"


def decode_ranking(data: bytes, place: str) -> tuple[list[int], int]:
    """The evaluated steps in the ranking of `place`, the best first, and how many are to be kept. Raises CheckpointError."""
    try:
        content = files.load_json(data)
        steps, keep = [int(step) for step in content["steps"]], int(content["keep"])
        if keep < 0:
            raise ValueError(f"keep is {keep}")
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        message = f"{place}/{RANKING} is damaged, so the best checkpoint is not known: {error}"
        raise CheckpointError(message, fix="remove it; the next evaluation writes a new one") from error
    return steps, keep


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Step and revision in the name of a checkpoint's directory; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def read_entry(path: Path) -> Entry:
    """The checkpoint in a directory. Its step and revision are those in the name, if that is one of a checkpoint."""
    manifest, problem = None, ""
    try:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError("not a directory")
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = error.message
    step, revision = parse_checkpoint_name(path.name) or (manifest.step if manifest else 0, 1)
    return Entry(step=step, revision=revision, path=path, manifest=manifest, problem=problem)


def _unusable_error(result: Verification) -> CheckpointError:
    return CheckpointError(
        f"this checkpoint cannot be used: {_summary(result)}", fix='choose another one, or "latest" for the newest complete one'
    )


def _summary(result: Verification) -> str:
    more = len(result.problems) - 3
    return f"{result.path.name}: {'; '.join(result.problems[:3])}{f'; and {more} more' if more > 0 else ''}"


def _fingerprint(path: Path) -> object:
    """Changes whenever a file of the checkpoint is written, replaced, added or removed; None if it cannot be listed."""
    try:
        return [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files_in(path)]
    except OSError:
        return None
