"""Verifies that a checkpoint is complete: every byte is compared with the digests in the manifest before it is used.

Digests are computed while a file is written. Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from smalti.checkpoint.format.content_validation import find_non_finite, inconsistencies, why_not_resumable
from smalti.checkpoint.format.manifest import ALGORITHMS, GROUPS, MANIFEST, STATE, FileRecord, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import read_layout
from smalti.errors import CheckpointError
from smalti.system import files, note_progress, parse_json

_BLOCK = 4 * 2**20
_BUFFER_SIZE = 2**18
"""Bytes; small enough to stay in the cache of the CPU."""


class _Digest(Protocol):
    def update(self, data: files.Block, /) -> object: ...

    def hexdigest(self) -> str: ...


def write_with_digest(path: Path, contents: Iterable[files.Block]) -> FileRecord:
    """Write a new file with these contents, in blocks of any size, and sync it; returns its record for the manifest."""
    digest = new_digest(ALGORITHMS[0])
    with files.create(path) as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # a hashed block is still in the cache of the CPU when it is written
                block = data[start : start + _BLOCK]
                digest.update(block)
                files.write(file, block)
                note_progress()
        files.sync(file)
        return FileRecord(size=file.tell(), digest=digest.hexdigest())


def matches(path: Path, record: FileRecord) -> bool:
    """Whether a file has the recorded digest. Reads and hashes without the interpreter lock, so threads run in parallel."""
    digest, buffer = new_digest(record.algorithm), memoryview(bytearray(_BUFFER_SIZE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            note_progress()
    return digest.hexdigest() == record.digest


def new_digest(algorithm: str) -> _Digest:
    """An empty digest by one of the `ALGORITHMS`, for contents that are read in pieces."""
    return blake3() if algorithm == "blake3" else hashlib.new(algorithm)


_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result. `problems` are sentences; `manifest` is None if it cannot be read."""

    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def step(self) -> int | None:
        """The step in the manifest; None if that cannot be read."""
        return self.manifest.step if self.manifest else None


def verify(checkpoint: Path, *, rank: int = 0, ranks: int = 1, to_resume: bool = False) -> Verification:
    """Check a checkpoint directory: the manifest, names and sizes of all files, their contents, and that there are no others.

    state.json and the headers of tensors must be consistent too. With `to_resume`, a run must be able to resume from it, which
    requires finite numbers.

    With several `ranks` each reads every byte of its share of the files, several files at a time; together they read all.
    Never writes. Problems are returned, not raised.
    """
    return _verified(checkpoint, lambda files: _share(files, rank, ranks), consistent=rank == 0, to_resume=to_resume)


def quick_check(checkpoint: Path) -> Verification:
    """Like `verify` with `to_resume`, but without reading tensors, so it is fast."""
    return _verified(checkpoint, lambda files: [(STATE, files[STATE])], consistent=True, to_resume=True)


def _verified(
    checkpoint: Path,
    share_of: Callable[[Mapping[str, FileRecord]], list[tuple[str, FileRecord]]],
    *,
    consistent: bool,
    to_resume: bool,
) -> Verification:
    """Reads the files that `share_of` chooses of all; `consistent` asks for what no single file can tell."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return Verification(path=checkpoint, manifest=None, problems=(error.message,))
    problems = _listing_problems(checkpoint, manifest)
    share = {name: record for name, record in share_of(manifest.files) if name not in problems}
    with ThreadPoolExecutor(max_workers=min(_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _content_problem(checkpoint / name, name, share[name], to_resume), share)
        problems |= {name: problem for name, problem in zip(share, found, strict=True) if problem}
    if not problems and consistent:
        problems |= inconsistencies(checkpoint, manifest)
        if not problems and to_resume and (reason := why_not_resumable(checkpoint)):
            problems[STATE] = reason.removeprefix(f"{STATE} ")
    return Verification(path=checkpoint, manifest=manifest, problems=_sentences(checkpoint, manifest, problems))


def is_ignored(name: str) -> bool:
    """Whether a file or directory is one that file browsers and network file systems create (.DS_Store, .nfs...).

    These are ignored. A file that a reader of tensors would load is not.
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
    """Returns the step in the name of a checkpoint directory; None if there is none."""
    number = checkpoint.name.removeprefix("step-").partition(".")[0]
    return int(number) if checkpoint.name.startswith("step-") and number.isdecimal() else None


def _sentences(checkpoint: Path, manifest: Manifest, problems: Mapping[str, str]) -> tuple[str, ...]:
    """Returns one sentence for each problem, including a wrong step."""
    wrong_step = {MANIFEST: f"is of step {manifest.step}, which is not the step in the directory name"}
    found = dict(problems) | (wrong_step if named_step(checkpoint) not in (None, manifest.step) else {})
    return tuple(f"{name} {problem}" for name, problem in sorted(found.items()))


def _listing_problems(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Returns by name what is wrong with the listing: missing and extra files, kinds and sizes."""
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
    """Assigns about the same number of bytes to each rank: the largest files first, each to the rank with the fewest."""
    assigned: list[list[tuple[str, FileRecord]]] = [[] for _ in range(ranks)]
    bytes_of = [0] * ranks
    for name, record in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        smallest = bytes_of.index(min(bytes_of))
        assigned[smallest].append((name, record))
        bytes_of[smallest] += record.size
    return assigned[rank]


def _content_problem(path: Path, name: str, record: FileRecord, to_resume: bool) -> str:
    """Returns what is wrong inside one file; "" if nothing is."""
    try:
        if not matches(path, record):
            return "does not match its digest: damaged or edited"
        if name.endswith(".json"):
            parse_json(path.read_bytes())
        else:
            read_layout(path)
            if to_resume and name.partition("/")[0] in GROUPS and (tensor := find_non_finite(path)):
                return f"has numbers that are not finite, in {tensor}"
    except CheckpointError as error:
        return error.message
    except ValueError as error:
        return f"is not valid JSON: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
