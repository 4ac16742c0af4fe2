"""Copies the newest checkpoint of a run and its best ones to its mirror, with what else a resume needs; removes old ones there.

A process that is killed at any point leaves a mirror that offers the newest published checkpoint, and the next upload continues
where it stopped. A mirror has the layout of the run directory, so a copy of all files is a run directory:

    checkpoints/step-00000500/model/...     as in the run directory
    checkpoints/step-00000500/.claim.json   which contents this name belongs to: created once, before any other file
    checkpoints/step-00000500/manifest.json created once, after all other files: without it there is no checkpoint
    run.json, config.toml, launch.json, events.jsonl, data/trained/...   what a resume elsewhere needs
    mirror.json                             the run that the mirror belongs to: created once
    launches/00000003.json                  the launches of the run, each created once; only the last one writes

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import CheckpointError
from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    RANKING,
    STATE,
    SUSPECT,
    WEIGHTS,
    CheckpointStore,
    Entry,
    Manifest,
    checkpoint_name,
    read_manifest,
    verify,
)
from smalti.data import Storage, StorageError
from smalti.rundir import RunDirectory
from smalti_data.remote.checkpoints import UNUSABLE, RemoteCheckpoint, RemoteRun
from smalti_data.remote.downloads import TRANSFERS
from smalti_storage_s3.mirror.ownership import Lease

WORK = "mirror"
"""The folder of a run directory in which an upload works."""
RUN_FILES = (
    *("run.json", "config.toml", "launch.json", "accelerate*.yaml", "events*.jsonl"),
    *(f"checkpoints/{RANKING}", "evaluations/*.npy", "evaluations/images.json", "visits/*/*.bin"),
)
"""The files of a run directory that each upload replaces in the mirror. Checkpoints are never replaced."""
CLAIM = ".claim.json"
KEPT_FILES = "data/trained/*/*.arrow"
"""The indexes with which checkpoints were trained. They do not change once they are written."""
_SENDS = 3
"""How often a file is sent that the store accepts and then does not list."""


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """A checkpoint that is complete in the mirror. `size` is in bytes, of which `sent` were not there yet."""

    name: str
    step: int
    size: int
    sent: int
    seconds: float


@dataclass(kw_only=True)
class Uploader:
    """Uploads the checkpoints of one run, one at a time, as the launch that `lease` stands for.

    `keep` is the number of checkpoints in the mirror (None: all). With `read_back`, a checkpoint is read from the mirror and
    compared before an older one is removed; otherwise the store's own check of each upload counts.
    """

    run: RunDirectory
    lease: Lease
    keep: int | None = None
    read_back: bool = True
    report: Callable[[str], None] = lambda _sentence: None
    _pushed: set[str] = field(default_factory=set)
    _verified: set[str] = field(default_factory=set)
    _damaged: set[str] = field(default_factory=set)

    @property
    def storage(self) -> Storage:
        return self.lease.storage

    def push_newest(self) -> Uploaded | None:
        """Copy the newest complete checkpoint of the run, unless it is there; None if the run has none.

        Raises StorageError, CheckpointError or OSError if that is not possible now, SupersededError if a later launch writes.
        """
        for entry in reversed(CheckpointStore(self.run.checkpoints).all()):
            if entry.manifest is not None and (uploaded := self._push_if_intact(entry)) is not None:
                return uploaded
        return None

    def push_best(self) -> list[Uploaded]:
        """Copy the best checkpoints, as many as the ranking keeps, that this object has not copied yet; newest first.

        Training may have overtaken them before they were uploaded as the newest. Raises like `push_newest`; a ranking that is
        damaged is reported.
        """
        try:
            ranked, count = CheckpointStore(self.run.checkpoints).ranked()
        except CheckpointError as error:
            self.report(f"best checkpoints are not copied: {error.message}")
            return []
        best = sorted(ranked[:count], key=lambda entry: entry.step, reverse=True)
        found = [self._push_if_intact(entry) for entry in best if entry.path.name not in self._pushed]
        return [uploaded for uploaded in found if uploaded is not None]

    def _push_if_intact(self, entry: Entry) -> Uploaded | None:
        with held(self.run.path, entry.path) as path:
            if (found := verify(path)).ok:
                return self.push(path, entry)
        self.report(f"{entry.path} is not copied: {found.problems[0]}")
        return None

    def push(self, path: Path, entry: Entry) -> Uploaded:
        """Copy one checkpoint, whose files are at `path` and were verified."""
        started = time.perf_counter()
        self.lease.check()
        manifest = read_manifest(path)
        mirror = RemoteRun(self.storage)
        self._send_run_files()
        target, there = self._claim(mirror, manifest)
        sent = 0
        if not there:
            sent = self._send(path, manifest, target)
            self.lease.check()
            content = (path / MANIFEST).read_bytes()
            if not self.storage.create(target.prefix + MANIFEST, content):
                published = self.storage.read(target.prefix + MANIFEST)
                if published != content:
                    raise CheckpointError(f"{self.storage.location}/{target.prefix}{MANIFEST} was written by another process")
        self._pushed.add(entry.path.name)
        return Uploaded(
            name=target.name,
            step=entry.step,
            size=manifest.size,
            sent=sent,
            seconds=time.perf_counter() - started,
        )

    def _claim(self, mirror: RemoteRun, manifest: Manifest) -> tuple[RemoteCheckpoint, bool]:
        """The directory of the mirror for these contents, and whether they are there already.

        A directory belongs to the contents for which it was created. So two uploads, also of a process that was believed dead,
        never mix contents: either they write the same bytes, or into different directories.
        """
        contents = _contents(manifest)
        same_step = [each for each in mirror.all() if each.step == manifest.step]
        for each in reversed(same_step):
            if each.published and _holds(mirror, each, manifest):
                return each, True
        known = {each.revision: each for each in same_step}
        revision = max(known, default=1)
        while True:
            found = known.get(revision) or RemoteCheckpoint(
                name=checkpoint_name(manifest.step, revision), step=manifest.step, revision=revision
            )
            # What another program has put there has no claim, and is left alone.
            free = not found.published and (CLAIM in found.sizes or not found.sizes)
            if free and (
                self.storage.create(found.prefix + CLAIM, contents) or self.storage.read(found.prefix + CLAIM) == contents
            ):
                return found, False
            revision += 1

    def _send(self, path: Path, manifest: Manifest, target: RemoteCheckpoint) -> int:
        """Send the files that are not there. Those that are have these contents, because the directory is claimed for them.

        They are listed afterwards: a server that was killed may have lost what it had acknowledged, and that is sent again.
        """

        def send(name: str) -> int:
            self.storage.upload(path / name, target.prefix + name)
            return manifest.files[name].size

        sizes, sent = target.sizes, 0
        for _ in range(_SENDS):
            missing = [name for name, record in manifest.files.items() if sizes.get(name) != record.size]
            if not missing:
                return sent
            with ThreadPoolExecutor(TRANSFERS, "smalti-mirror") as pool:
                sent += sum(pool.map(send, sorted(missing)))
            sizes = {stored.key.removeprefix(target.prefix): stored.size for stored in self.storage.list(target.prefix)}
        lost = [name for name, record in manifest.files.items() if sizes.get(name) != record.size]
        if lost:
            raise StorageError(
                f"{self.storage.location}/{target.prefix}{lost[0]} is not there, and the store has accepted it {_SENDS} times",
                fix="look for the cause on the server; the next upload sends it again",
            )
        return sent

    def _send_run_files(self) -> None:
        """Send what describes the run, and the indexes of its data that are not there yet."""
        there = {stored.key: stored.size for stored in self.storage.list("data/trained/")}
        with TemporaryDirectory(dir=_work_folder(self.run.path), prefix="files-") as folder:
            for pattern in RUN_FILES:
                for file in sorted(self.run.path.glob(pattern)):
                    copy = Path(folder) / file.name  # of one moment, while the run appends to the file
                    shutil.copyfile(file, copy)
                    self.storage.upload(copy, file.relative_to(self.run.path).as_posix())
        for file in sorted(self.run.path.glob(KEPT_FILES)):
            key = file.relative_to(self.run.path).as_posix()
            if there.get(key) != file.stat().st_size:
                self.storage.upload(file, key)

    # --- removing old checkpoints -----------------------------------------------------------------------------------

    def rotate(self) -> list[str]:
        """Remove all but the newest `keep` complete checkpoints from the mirror; returns the names of what was removed.

        The best ones stay too, as many as the ranking says; CheckpointError while that cannot be read. Suspect ones do not
        count. Nothing is removed before the newest was found intact. Damaged ones, and those that another program has put
        there, are never removed.
        """
        if self.keep is None or not self.storage.deletes:
            return []
        mirror = RemoteRun(self.storage)
        entries = mirror.all()[::-1]
        while True:
            newest, old = self._removable(mirror, entries)
            if newest is None or not old:
                return []
            problems = mirror.problems(newest) if self.read_back and newest.name not in self._verified else ()
            if not problems:
                break
            self._skip(mirror, newest, problems[0])
        self._verified.add(newest.name)
        self.lease.check()
        for each in old:
            self._remove(each)
        return [each.name for each in old if each.published]

    def _removable(
        self, mirror: RemoteRun, entries: Sequence[RemoteCheckpoint]
    ) -> tuple[RemoteCheckpoint | None, list[RemoteCheckpoint]]:
        """The newest complete checkpoint, and what can be removed once it is known to be intact; newest first."""
        ranked, keep_best = mirror.ranked()
        best = {each.name for each in ranked[:keep_best]}
        kept: set[int] = set()
        newest, old = None, []
        for each in entries:
            if each.name in self._damaged:
                continue
            if not each.published:
                if newest is not None and CLAIM in each.sizes:
                    old.append(each)  # what an interrupted upload or removal has left
                continue
            try:
                manifest = mirror.manifest(each)
            except UNUSABLE as error:
                self._skip(mirror, each, error.message)
                continue
            newest = newest or each
            if len(kept) < (self.keep or 0) and each.step not in kept:
                if SUSPECT not in manifest.flags:
                    kept.add(each.step)
            elif kept and CLAIM in each.sizes and each.name not in best:
                old.append(each)
        return newest, old

    def _skip(self, mirror: RemoteRun, checkpoint: RemoteCheckpoint, problem: str) -> None:
        self._damaged.add(checkpoint.name)
        self.report(f"{mirror.location}/{checkpoint.prefix} is damaged and stays as it is: {problem}")

    def _remove(self, checkpoint: RemoteCheckpoint) -> None:
        """The manifest first, so that no incomplete checkpoint is ever offered; the claim last, so that the rest is found."""
        ours = {name for name in checkpoint.sizes if name.partition("/")[0] in (*GROUPS, WEIGHTS, STATE)}
        first, last = [MANIFEST] if checkpoint.published else [], [CLAIM]
        for name in (*first, *sorted(ours), *last):
            self.storage.delete(checkpoint.prefix + name)


@contextmanager
def held(run: Path, checkpoint: Path) -> Iterator[Path]:
    """The files of a checkpoint under another name for as long as they are needed, so that they outlive its rotation.

    Where the file system has no hard links, the checkpoint itself.
    """
    with TemporaryDirectory(dir=_work_folder(run), prefix="upload-", ignore_cleanup_errors=True) as folder:
        target = Path(folder) / checkpoint.name
        try:
            for file in checkpoint.rglob("*"):
                if file.is_file() and not file.name.startswith("."):
                    link = target / file.relative_to(checkpoint)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.hardlink_to(file)
        except OSError:
            target = checkpoint
        yield target


def _work_folder(run: Path) -> Path:
    folder = run / WORK
    folder.mkdir(exist_ok=True)
    return folder


def _contents(manifest: Manifest) -> bytes:
    """What a directory of a mirror is claimed with: a digest of the contents, without the time at which they were saved."""
    digest = sha256(replace(manifest, created="").encode()).hexdigest()
    return json.dumps({"kind": "smalti-mirror-claim", "contents": digest}).encode() + b"\n"


def _holds(mirror: RemoteRun, checkpoint: RemoteCheckpoint, manifest: Manifest) -> bool:
    try:
        return mirror.manifest(checkpoint).holds_the_same_as(manifest)
    except UNUSABLE:
        return False
