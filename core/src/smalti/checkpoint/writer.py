"""Saves a checkpoint: every rank writes its share, then one rename makes the checkpoint visible.

The files have the layout of torch's sharded safetensors checkpoints, but are written here: digests are computed while writing,
several files are written at a time and a failure of any of them is raised, tensors need not be contiguous or have separate
memory, and the same state always gives the same bytes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from torch import Tensor

from smalti.checkpoint.format.full_weights import write_copy
from smalti.checkpoint.format.manifest import GROUPS, STATE, FileRecord, Manifest
from smalti.checkpoint.format.safetensors_layout import encode_header, split
from smalti.checkpoint.format.state_file import State
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import matches, write_with_digest
from smalti.checkpoint.planning import Chunks, memory, plan_on_all_ranks
from smalti.checkpoint.snapshot import Relay, Snapshot
from smalti.errors import CheckpointError, ExitCode, UserError
from smalti.parallel import Communicator, RankError, run_on_all_ranks, run_on_main_rank, use_device
from smalti.rundir import wait_for_directory
from smalti.system import files, format_bytes
from smalti.types import Checkpoint, World

_THREADS = 4
_MIN_FILE_SIZE = 64 * 2**20
_MAX_FILE_SIZE = 512 * 2**20
_FIXES = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints with --checkpoints_total_limit",
    errno.EDQUOT: "free space there, raise the quota, or keep fewer checkpoints with --checkpoints_total_limit",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "remount it for writing; the system often makes a disk with errors read-only",
    errno.EACCES: "give this user write permission there",
    errno.EPERM: "give this user write permission there",
    errno.EIO: "check the disk or the network storage: the system log has details",
}
"""Fixes by the system's error number."""


class SaveError(UserError):
    """A checkpoint could not be written. Older ones are intact. `errno` is the system's number, such as ENOSPC, if any."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, fix: str = "", errno: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.errno = errno


def save(root: Path, snapshot: Snapshot, communicator: Communicator, *, full_weights: bool = False) -> Checkpoint:
    """Write a checkpoint below `root`, the same directory for all ranks. *Collective*; returns the same on every rank.

    With `snapshot.relay`, ranks on other nodes may see another directory there. Their files are brought to that of the main
    rank, and the checkpoint is visible there alone.

    When it returns, the checkpoint is complete, visible and synced to disk. Saving a step again in the same state returns the
    older checkpoint; in another state it makes a new one, which takes precedence. The tensors must not change while
    this runs; those that `divide` gives to another rank are not read. With `full_weights` the main rank adds a copy of the
    weights for other tools, `smalti.checkpoint.format.full_weights`, while the others wait for it. Raises SaveError on all
    ranks if any of them failed, or if there is not enough space; then nothing has become visible and older checkpoints are
    intact.
    """
    started = time.perf_counter()
    try:
        with ExitStack() as cleanup:
            path, size = _save(CheckpointStore(root), snapshot, communicator, full_weights, cleanup)
    except RankError as failure:
        raise _explain(root, snapshot, failure, full_weights) from failure
    return Checkpoint(step=snapshot.step, path=path, size=size, seconds=time.perf_counter() - started)


def _explain(root: Path, snapshot: Snapshot, failure: RankError, full_weights: bool) -> SaveError:
    """The error, with the space that is needed and free if that can be the cause, and with a fix."""
    message = f"cannot save step {snapshot.step} in {root}: {failure}"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = _needed({name: t.numel() * t.element_size() for name, t in snapshot.tensors().items()}, full_weights)
        message += f" ({format_bytes(needed)} needed{_free_text(root)})"
    fix = failure.fix or _FIXES.get(failure.errno or 0, "")
    return SaveError(message, fix=fix, errno=failure.errno)


def _free_text(root: Path) -> str:
    try:
        free = files.free_bytes(root)
    except OSError:
        return ""
    return "" if free is None else f", {format_bytes(free)} free"


def _needed(sizes: Mapping[str, int], full_weights: bool) -> int:
    """Bytes of tensors in the checkpoint, given the bytes of each tensor by "GROUP/NAME"."""
    return sum(size * (2 if full_weights and name.startswith("model/") else 1) for name, size in sizes.items())


def _check_free_space(free: int | None, sizes: Mapping[str, int], full_weights: bool) -> None:
    """Raises OSError if the file system reports too little free space for tensors of these sizes."""
    if free is not None and _needed(sizes, full_weights) > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _raise_missing_directory(directory: Path, communicator: Communicator, *, invisible: bool) -> None:
    """Raises RankError on all ranks: the directory was removed, or some rank sees other storage. *Collective*."""
    removed = run_on_all_ranks(communicator, lambda: "" if directory.is_dir() else "removed")[0]

    def check() -> str:
        if removed:  # for the main rank, which made it: the same error on every rank
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}")
        if invisible:
            message = f"{directory} is not visible on this node"
            raise CheckpointError(message, fix="put --output_dir on storage that all nodes share")
        return ""

    run_on_all_ranks(communicator, check)


@dataclass(kw_only=True)
class _Opened:
    """The directory of a save on this rank. `seen` says for each rank whether that is the directory of the main rank.

    `free` is the space in it before any rank writes, on the main rank.
    """

    directory: Path
    seen: list[bool]
    free: int | None = None


def _open(store: CheckpointStore, snapshot: Snapshot, communicator: Communicator, cleanup: ExitStack) -> _Opened:
    """Make the directory of a save. *Collective*. Raises RankError on all ranks if it is missing on one that needs it."""
    main, rank = communicator.world.is_main, communicator.world.rank

    def begin() -> str:
        if not main:
            return ""
        cleanup.enter_context(store.exclusive())
        prepared = store.prepare(snapshot.step)
        cleanup.callback(store.discard, prepared)  # by then it was renamed to the checkpoint, or the save failed
        return str(prepared)

    directory = Path(run_on_all_ranks(communicator, begin)[0])
    opened = _Opened(directory=directory, seen=[])

    def check() -> str:
        late = not main and snapshot.relay is None
        if not (wait_for_directory(directory, store.root.parent) if late else directory.is_dir()):
            return ""
        if main:
            opened.free = files.free_bytes(directory)  # before any rank writes
        return "seen"

    opened.seen = [bool(answer) for answer in run_on_all_ranks(communicator, check)]
    if not all(opened.seen) and (snapshot.relay is None or not opened.seen[0]):
        _raise_missing_directory(directory, communicator, invisible=not opened.seen[rank])
    if not opened.seen[rank]:
        opened.directory = _own_directory(directory, rank, cleanup)
    return opened


def _save(
    store: CheckpointStore, snapshot: Snapshot, communicator: Communicator, full_weights: bool, cleanup: ExitStack
) -> tuple[Path, int]:
    main, relay = communicator.world.is_main, snapshot.relay
    tensors = snapshot.tensors()
    opened = _open(store, snapshot, communicator, cleanup)
    directory, remote = opened.directory, not opened.seen[communicator.world.rank]
    plan = plan_on_all_ranks(communicator, tensors)

    def write() -> str:
        if main:
            _check_free_space(opened.free, plan.sizes, full_weights)
        records = _write_tensors(directory, plan.mine, tensors, communicator.world)
        if remote and relay is not None:
            for name in records:
                relay.send(directory / name, name)
        if main:
            records[STATE] = write_with_digest(directory / STATE, [_state(snapshot)])
        return _encode(records)

    if relay is not None and main:
        cleanup.callback(_clear, relay)
    parts = [_decode(part) for part in run_on_all_ranks(communicator, write)]
    records = {name: record for part in parts for name, record in part.items()}
    if relay is not None and not all(opened.seen):
        sent = [item for part, seen in zip(parts, opened.seen, strict=True) if not seen for item in part.items()]
        run_on_main_rank(communicator, lambda: _fetch(relay, directory, dict(sent)))

    def copy() -> str:
        model = sorted(name for name in records if name.startswith("model/"))
        return _encode(write_copy(directory, model, _config(snapshot)))

    if full_weights:
        records |= _decode(run_on_main_rank(communicator, copy))
    manifest = Manifest(
        step=snapshot.step,
        world_size=communicator.world.size,
        files=records,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plugins=snapshot.plugins,
        config_digest=snapshot.config_digest,
        flags=snapshot.flags,
    )

    def publish() -> str:
        return str(store.publish(directory, manifest, confirm=snapshot.confirm)) if main else ""

    return Path(run_on_all_ranks(communicator, publish)[0]), manifest.size


def _own_directory(directory: Path, rank: int, cleanup: ExitStack) -> Path:
    """A directory for the files of a rank that does not see that of the main rank. It is removed after the save."""
    for left in directory.parent.glob(f".partial-*.{rank}"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    own = directory.with_name(f"{directory.name}.{rank}")
    for group in GROUPS:
        (own / group).mkdir(parents=True)
    cleanup.callback(shutil.rmtree, own, ignore_errors=True)
    return own


def _fetch(relay: Relay, directory: Path, records: Mapping[str, FileRecord]) -> str:
    """Bring the files of ranks on other nodes into the directory. Raises CheckpointError if one arrives damaged."""
    for name, record in records.items():
        relay.fetch(name, directory / name)
        if not matches(directory / name, record):
            raise CheckpointError(f"{name} was damaged on its way from another node", fix="the next save tries again")
    return ""


def _clear(relay: Relay) -> None:
    with suppress(UserError, OSError):  # the next save clears it
        relay.clear()


def _state(snapshot: Snapshot) -> bytes:
    state = snapshot.state
    return State(
        step=snapshot.step,
        optimizer=state.optimizer,
        param_groups=state.param_groups,
        trainer=snapshot.trainer,
        model_config=_config(snapshot),
    ).encode()


def _config(snapshot: Snapshot) -> dict[str, object] | None:
    return dict(json.loads(snapshot.model_config)) if snapshot.model_config else None


def _encode(records: Mapping[str, FileRecord]) -> str:
    """Encodes records for the other ranks."""
    return json.dumps({name: vars(record) for name, record in records.items()})


def _decode(text: str) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in json.loads(text).items()}


def _write_tensors(directory: Path, chunks: Chunks, tensors: Mapping[str, Tensor], world: World) -> dict[str, FileRecord]:
    """Write this rank's share, several files at a time; returns their records by relative name."""

    def write(item: tuple[str, list[str]]) -> tuple[str, FileRecord]:
        file, names = item
        header = encode_header([(name.partition("/")[2], chunks[name]) for name in names])
        return file, write_with_digest(directory / file, chain([header], (memory(tensors[name]) for name in names)))

    share = sum(chunk.size for chunk in chunks.values()) // _THREADS
    limit = min(max(share, _MIN_FILE_SIZE), _MAX_FILE_SIZE)  # small enough for threads to share the work
    contents = {
        f"{group}/rank-{world.rank:05d}-part-{number:05d}.safetensors": names
        for group in GROUPS
        for number, names in enumerate(split({n: p for n, p in chunks.items() if n.startswith(f"{group}/")}, limit))
    }
    threads = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=use_device, initargs=(world.device,)) as pool:
        records = dict(pool.map(write, contents.items()))
    for group in GROUPS:
        files.fsync_directory(directory / group)
    return records
