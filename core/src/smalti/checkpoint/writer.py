"""Saving: every rank writes its share, then one rename makes the checkpoint visible.

The files have the layout of torch's sharded safetensors checkpoints, but are written here: digests are taken while writing
instead of by reading everything again, several files go out at a time and a failure of any of them counts, tensors need be
neither contiguous nor of separate memory, and the same state always gives the same bytes.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from torch import Tensor

from smalti.checkpoint.format.digests import write_with_digest
from smalti.checkpoint.format.full_weights import write_copy
from smalti.checkpoint.format.manifest import GROUPS, STATE, FileRecord, Manifest
from smalti.checkpoint.format.safetensors_layout import encode_header, split
from smalti.checkpoint.format.statefile import State
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.planning import Chunks, memory, plan_on_all_ranks
from smalti.checkpoint.snapshot import Snapshot
from smalti.errors import CheckpointError, ExitCode, UserError
from smalti.parallel import Communicator, RankError, run_on_all_ranks, run_on_main_rank, use_device
from smalti.system import files
from smalti.types import Checkpoint, World

_THREADS = 4
_SMALLEST_FILE = 64 * 2**20
_LARGEST_FILE = 512 * 2**20
_REMEDIES = {
    errno.ENOSPC: "make room there, or keep fewer with --checkpoints_total_limit",
    errno.EDQUOT: "make room there or have the quota raised, or keep fewer with --checkpoints_total_limit",
    errno.EFBIG: "have the limit on the size of files raised (ulimit -f)",
    errno.EROFS: "mount it for writing; a disk with errors is often made read-only by the system",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EIO: "look after the disk or the network storage: the system's log tells more",
}
"""What the user can do, by the system's error number."""


class SaveError(UserError):
    """A checkpoint could not be written. Older ones are intact. `errno` is the system's number, such as ENOSPC, if any."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, fix: str = "", errno: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.errno = errno


def save(root: Path, snapshot: Snapshot, ranks: Communicator, *, full_weights: bool = False) -> Checkpoint:
    """Write a checkpoint below `root`, the same directory for all ranks. *Collective*; the same answer on every rank.

    When it returns, the checkpoint is complete, visible and on the disk. Saving a step that is already there in the same state
    returns the older checkpoint; in another state, makes a new one that counts from then on. The tensors must not change while
    this runs; those that `divide` gives to another rank are not read. With `full_weights` the main rank adds a copy of the
    weights for other tools, `smalti.checkpoint.format.full_weights`, while the others wait for it. Raises SaveError on all
    ranks when any of them failed, or when there is no room for it; then nothing has become visible and older checkpoints are
    intact.
    """
    started = time.perf_counter()
    try:
        with ExitStack() as cleanup:
            path, size = _save(CheckpointStore(root), snapshot, ranks, full_weights, cleanup)
    except RankError as failure:
        raise _explained(root, snapshot, failure, full_weights) from failure
    return Checkpoint(step=snapshot.step, path=path, size=size, seconds=time.perf_counter() - started)


def _explained(root: Path, snapshot: Snapshot, failure: RankError, full_weights: bool) -> SaveError:
    """With what was needed and what is free, where that can be the matter, and with what to do."""
    message = f"cannot save step {snapshot.step} in {root}: {failure}"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = _needed({name: t.numel() * t.element_size() for name, t in snapshot.tensors().items()}, full_weights)
        message += f" ({_readable(needed)} needed{_free_text(root)})"
    fix = failure.fix or _REMEDIES.get(failure.errno or 0, "")
    return SaveError(message, fix=fix, errno=failure.errno)


def _free_text(root: Path) -> str:
    try:
        room = files.free_bytes(root)
    except OSError:
        return ""
    return "" if room is None else f", {_readable(room)} free"


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _needed(sizes: Mapping[str, int], full_weights: bool) -> int:
    """Bytes of tensors in the checkpoint, given those of each tensor, "GROUP/NAME"."""
    return sum(size * (2 if full_weights and name.startswith("model/") else 1) for name, size in sizes.items())


def _check_free_space(room: int | None, sizes: Mapping[str, int], full_weights: bool) -> None:
    """Raises OSError when the file system has said that it cannot hold tensors of these sizes."""
    if room is not None and _needed(sizes, full_weights) > room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _blame(directory: Path, ranks: Communicator, *, unseen: bool) -> None:
    """Raises RankError on all ranks: somebody removed the directory, or else some rank sees other storage. *Collective*."""

    def look() -> str:
        if ranks.world.is_main and not directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}")
        if unseen:
            message = f"{directory} is not visible on this node"
            raise CheckpointError(message, fix="put --output_dir on storage that all nodes share")
        return ""

    run_on_all_ranks(ranks, look)


def _save(
    store: CheckpointStore, snapshot: Snapshot, ranks: Communicator, full_weights: bool, cleanup: ExitStack
) -> tuple[Path, int]:
    main = ranks.world.is_main
    tensors = snapshot.tensors()

    def begin() -> str:
        if not main:
            return ""
        cleanup.enter_context(store.exclusive())
        prepared = store.prepare(snapshot.step)
        cleanup.callback(store.discard, prepared)  # by then it has become the checkpoint, or is of no use
        return str(prepared)

    directory = Path(run_on_all_ranks(ranks, begin)[0])
    room: int | None = None

    def look() -> str:
        nonlocal room
        if not directory.is_dir():
            return ""
        if main:
            room = files.free_bytes(directory)  # now, because no rank writes before all have looked
        return "seen"

    seen = run_on_all_ranks(ranks, look)
    if "" in seen:
        _blame(directory, ranks, unseen=not seen[ranks.world.rank])
    division = plan_on_all_ranks(ranks, tensors)

    def write() -> str:
        if main:
            _check_free_space(room, division.sizes, full_weights)
        records = _write_tensors(directory, division.mine, tensors, ranks.world)
        if main:
            records[STATE] = write_with_digest(directory / STATE, [_state(snapshot)])
        return _encode(records)

    records = {name: record for part in run_on_all_ranks(ranks, write) for name, record in _decode(part).items()}

    def copy() -> str:
        model = sorted(name for name in records if name.startswith("model/"))
        return _encode(write_copy(directory, model, _config(snapshot)))

    if full_weights:
        records |= _decode(run_on_main_rank(ranks, copy))
    manifest = Manifest(
        step=snapshot.step,
        world_size=ranks.world.size,
        files=records,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plugins=snapshot.plugins,
        config_digest=snapshot.config_digest,
        flags=snapshot.flags,
    )
    path = run_on_all_ranks(ranks, lambda: str(store.publish(directory, manifest)) if main else "")[0]
    return Path(path), manifest.size


def _state(snapshot: Snapshot) -> bytes:
    state = snapshot.state
    return State(
        step=snapshot.step,
        optimizer=state.optimizer,
        settings=state.param_groups,
        trainer=snapshot.trainer,
        model_config=_config(snapshot),
    ).encode()


def _config(snapshot: Snapshot) -> dict[str, object] | None:
    return dict(json.loads(snapshot.model_config)) if snapshot.model_config else None


def _encode(records: Mapping[str, FileRecord]) -> str:
    """For the way to the other ranks."""
    return json.dumps({name: vars(record) for name, record in records.items()})


def _decode(text: str) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in json.loads(text).items()}


def _write_tensors(directory: Path, chunks: Chunks, tensors: Mapping[str, Tensor], world: World) -> dict[str, FileRecord]:
    """This rank's share, several files at a time; their records by relative name."""

    def write(item: tuple[str, list[str]]) -> tuple[str, FileRecord]:
        file, names = item
        header = encode_header([(name.partition("/")[2], chunks[name]) for name in names])
        return file, write_with_digest(directory / file, chain([header], (memory(tensors[name]) for name in names)))

    share = sum(chunk.size for chunk in chunks.values()) // _THREADS
    limit = min(max(share, _SMALLEST_FILE), _LARGEST_FILE)  # small enough for threads to share the work
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
