"""Is this checkpoint whole? Every byte is compared with the digests in the manifest before any of it is used.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from smalti.checkpoint.format.content_validation import find_non_finite, inconsistencies, why_not_resumable
from smalti.checkpoint.format.digests import matches
from smalti.checkpoint.format.manifest import GROUPS, MANIFEST, STATE, FileRecord, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import read_header
from smalti.errors import CheckpointError
from smalti.system import parse_json

_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome. `problems` says what is wrong, one sentence each; `manifest` is None when it cannot be read."""

    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def step(self) -> int | None:
        """What the manifest says; None when it cannot be read."""
        return self.manifest.step if self.manifest else None


def verify(checkpoint: Path, *, rank: int = 0, ranks: int = 1, to_resume: bool = False) -> Verification:
    """Check a checkpoint directory: the manifest, names and sizes of all files, their contents, nothing else beside them.

    What state.json and the headers of tensors say must make sense too. With `to_resume`, a run must be able to go on from it,
    which takes finite numbers.

    With several `ranks` each reads the contents of its share of the files only; together they have read all. Reads every
    byte of that share, several files at a time; never writes. What is wrong is told in the result, not raised.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return Verification(path=checkpoint, manifest=None, problems=(error.message,))
    problems = _listing_problems(checkpoint, manifest)
    mine = {name: record for name, record in _share(manifest.files, rank, ranks) if name not in problems}
    with ThreadPoolExecutor(max_workers=min(_THREADS, os.cpu_count() or 1)) as pool:
        told = pool.map(lambda name: _content_problem(checkpoint / name, name, mine[name], to_resume), mine)
        problems |= {name: problem for name, problem in zip(mine, told, strict=True) if problem}
    if not problems and rank == 0:
        problems |= inconsistencies(checkpoint, manifest)
        if not problems and to_resume and (reason := why_not_resumable(checkpoint)):
            problems[STATE] = reason.removeprefix(f"{STATE} ")
    return Verification(path=checkpoint, manifest=manifest, problems=_told(checkpoint, manifest, problems))


def quick_check(checkpoint: Path) -> Verification:
    """The same for a run that is to resume, without the contents of tensors. Takes no time."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return Verification(path=checkpoint, manifest=None, problems=(error.message,))
    problems = _listing_problems(checkpoint, manifest)
    if not problems and (problem := _content_problem(checkpoint / STATE, STATE, manifest.files[STATE], to_resume=True)):
        problems[STATE] = problem
    if not problems and (reason := why_not_resumable(checkpoint)):
        problems[STATE] = reason.removeprefix(f"{STATE} ")
    if not problems:
        problems |= inconsistencies(checkpoint, manifest)
    return Verification(path=checkpoint, manifest=manifest, problems=_told(checkpoint, manifest, problems))


def is_ignored(name: str) -> bool:
    """Whether a file or directory is one that file browsers and network file systems leave behind (.DS_Store, .nfs...).

    They are no part of a checkpoint and no damage to it. Whatever a reader of tensors would pick up is not foreign.
    """
    return name.startswith(".") and not name.endswith(".safetensors")


def files_in(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything in a checkpoint directory but its sub-directories, by relative name, without following links."""
    with os.scandir(directory) as entries:
        found = sorted((entry for entry in entries if not is_ignored(entry.name)), key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            for name, status in files_in(directory / entry.name):
                yield f"{entry.name}/{name}", status
        else:
            yield entry.name, entry.stat(follow_symlinks=False)


def named_step(checkpoint: Path) -> int | None:
    """The step that the name of a checkpoint directory tells; None when it tells none."""
    number = checkpoint.name.removeprefix("step-").partition(".")[0]
    return int(number) if checkpoint.name.startswith("step-") and number.isdecimal() else None


def _told(checkpoint: Path, manifest: Manifest, problems: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence for each problem, that of the step among them."""
    wrong_step = {MANIFEST: f"is of step {manifest.step}, not of the step in the directory's name"}
    found = dict(problems) | (wrong_step if named_step(checkpoint) not in (None, manifest.step) else {})
    return tuple(f"{name} {problem}" for name, problem in sorted(found.items()))


def _listing_problems(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Whether the files listed, and no others, are there, of the right kind and size. What is wrong, by name."""
    try:
        present = dict(files_in(checkpoint))
    except OSError as error:
        return {checkpoint.name: f"cannot be listed: {error.strerror}"}
    present.pop(MANIFEST, None)
    problems = {name: "is missing" for name in manifest.files if name not in present}
    for name, status in present.items():
        if stat.S_ISLNK(status.st_mode):
            problems[name] = "is a symbolic link"
        elif not stat.S_ISREG(status.st_mode):
            problems[name] = "is not a regular file"
        elif name not in manifest.files:
            problems[name] = "is not in the manifest"
        elif status.st_size != manifest.files[name].size:
            problems[name] = f"has {status.st_size} bytes where the manifest says {manifest.files[name].size}"
    return problems


def _share(files: Mapping[str, FileRecord], rank: int, ranks: int) -> list[tuple[str, FileRecord]]:
    """About as many bytes for each rank: the largest files first, each to who has least. All ranks find the same."""
    given: list[list[tuple[str, FileRecord]]] = [[] for _ in range(ranks)]
    bytes_of = [0] * ranks
    for name, record in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        least = bytes_of.index(min(bytes_of))
        given[least].append((name, record))
        bytes_of[least] += record.size
    return given[rank]


def _content_problem(path: Path, name: str, record: FileRecord, to_resume: bool) -> str:
    """What is wrong inside one file; "" when nothing is."""
    try:
        if not matches(path, record):
            return "does not match its digest: damaged or edited"
        if name.endswith(".json"):
            parse_json(path.read_bytes())
        else:
            read_header(path)
            if to_resume and name.partition("/")[0] in GROUPS and (tensor := find_non_finite(path)):
                return f"holds numbers that are not finite, in {tensor}"
    except CheckpointError as error:
        return error.message
    except ValueError as error:
        return f"is not sound JSON: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
