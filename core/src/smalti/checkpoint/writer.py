"""Saving: every rank writes its share, then one rename makes the checkpoint visible.

The files have the layout of torch's sharded safetensors checkpoints, but are written here: digests are taken while writing
instead of by reading everything again, several files go out at a time and a failure of any of them counts, tensors need be
neither contiguous nor of separate memory, and the same state always gives the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti import files
from smalti.checkpoint.agreement import RankError, together
from smalti.checkpoint.manifest import GROUPS, STATE, FileRecord, Manifest
from smalti.checkpoint.planning import Pieces, check_whole, decode_pieces, divide, encode_pieces, local_pieces
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.store import CheckpointStore
from smalti.checkpoint.tensorfile import ITEM_SIZES, encode_header
from smalti.errors import CheckpointError, ExitCode, UserError
from smalti.parallel import Ranks
from smalti.types import Checkpoint

_THREADS = 4
_SMALLEST_FILE = 64 * 2**20
_LARGEST_FILE = 512 * 2**20
_BLOCK = 4 * 2**20


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


def save(root: Path, snapshot: Snapshot, ranks: Ranks) -> Checkpoint:
    """Write a checkpoint below `root`, the same directory for all ranks. *Collective*; the same answer on every rank.

    When it returns, the checkpoint is complete, visible and on the disk. Saving a step that is already there in the same
    state returns the older checkpoint; in another state, makes a new one that counts from then on. The tensors must not
    change while this runs; those that `divide` gives to another rank are not read. Raises SaveError on all ranks when any of
    them failed, or when there is no room for it; then nothing has become visible and older checkpoints are intact.
    """
    started = time.perf_counter()
    try:
        with ExitStack() as cleanup:
            path, size = _save(CheckpointStore(root), snapshot, ranks, cleanup)
    except RankError as failure:
        raise _explained(root, snapshot, failure) from failure
    return Checkpoint(step=snapshot.step, path=path, size=size, seconds=time.perf_counter() - started)


def _explained(root: Path, snapshot: Snapshot, failure: RankError) -> SaveError:
    """With what was needed and what is free, where that can be the matter, and with what to do."""
    message = f"cannot save step {snapshot.step} in {root}: {failure}"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.tensors().values())
        message += f" ({_readable(needed)} needed{_told_free(root)})"
    fix = failure.fix or _REMEDIES.get(failure.errno or 0, "")
    return SaveError(message, fix=fix, errno=failure.errno)


def _told_free(root: Path) -> str:
    try:
        room = files.free_bytes(root)
    except OSError:
        return ""
    return "" if room is None else f", {_readable(room)} free"


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _check_room(room: int | None, held: Sequence[Pieces]) -> None:
    """Raises OSError when the file system has said that it cannot hold these pieces, each once."""
    needed = sum({(name, piece.offsets): piece.size for pieces in held for name, piece in pieces.items()}.values())
    if room is not None and needed > room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save(store: CheckpointStore, snapshot: Snapshot, ranks: Ranks, cleanup: ExitStack) -> tuple[Path, int]:
    main = ranks.world.is_main
    tensors = snapshot.tensors()

    def begin() -> str:
        if not main:
            return ""
        cleanup.enter_context(store.exclusive())
        prepared = store.prepare(snapshot.step)
        cleanup.callback(store.discard, prepared)  # by then it has become the checkpoint, or is of no use
        return str(prepared)

    directory = Path(together(ranks, begin)[0])
    room: int | None = None

    def plan() -> str:
        nonlocal room
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not visible on this node", fix="put --output_dir on storage that all nodes share"
            )
        if main:
            room = files.free_bytes(directory)  # now, because no rank writes before all have planned
        return encode_pieces(local_pieces(tensors))

    held = [decode_pieces(text) for text in together(ranks, plan)]
    rank = ranks.world.rank

    def write() -> str:
        check_whole(held, tensors)
        if main:
            _check_room(room, held)
        mine = {name: held[rank][name] for name in divide(held)[rank]}
        records = _write_tensors(directory, mine, tensors, rank)
        if main:
            records[STATE] = _write_file(directory / STATE, [_state(snapshot)])
        return json.dumps({name: vars(record) for name, record in records.items()})

    parts = [json.loads(text) for text in together(ranks, write)]
    records = {name: FileRecord(**record) for part in parts for name, record in part.items()}
    manifest = Manifest(
        step=snapshot.step,
        world_size=ranks.world.size,
        files=records,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plugins=snapshot.plugins,
        config_digest=snapshot.config_digest,
        flags=snapshot.flags,
    )
    path = together(ranks, lambda: str(store.publish(directory, manifest)) if main else "")[0]
    return Path(path), manifest.size


def _state(snapshot: Snapshot) -> bytes:
    state = {
        "step": snapshot.step,
        "optimizer": {"name": snapshot.state.optimizer, "settings": snapshot.state.settings},
        "trainer": dict(snapshot.trainer),
    }
    return json.dumps(state, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _write_tensors(directory: Path, pieces: Pieces, tensors: Mapping[str, Tensor], rank: int) -> dict[str, FileRecord]:
    """This rank's share, several files at a time; their records by relative name."""

    def write(item: tuple[str, list[str]]) -> tuple[str, FileRecord]:
        file, names = item
        header = encode_header([(name.partition("/")[2], pieces[name]) for name in names])
        return file, _write_file(directory / file, chain([header], (_memory(tensors[name]) for name in names)))

    contents = {
        f"{group}/rank-{rank:05d}-part-{number:05d}.safetensors": names
        for group in GROUPS
        for number, names in enumerate(_parts(pieces, group))
    }
    with ThreadPoolExecutor(max_workers=min(_THREADS, os.cpu_count() or 1)) as pool:
        records = dict(pool.map(write, contents.items()))
    for group in GROUPS:
        files.fsync_directory(directory / group)
    return records


def _parts(pieces: Pieces, group: str) -> list[list[str]]:
    """The tensors of one group, cut into files small enough for threads to share the work."""
    share = sum(piece.size for piece in pieces.values()) // _THREADS
    limit = min(max(share, _SMALLEST_FILE), _LARGEST_FILE)
    parts: list[list[str]] = []
    room = 0
    # Wide elements first: then every tensor starts at a multiple of its element size.
    names = (name for name in pieces if name.startswith(f"{group}/"))
    for name in sorted(names, key=lambda name: (-ITEM_SIZES[pieces[name].dtype], name)):
        if not parts or room < pieces[name].size:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= pieces[name].size
    return parts


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of this rank's part of a tensor, row by row."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_file(path: Path, contents: Iterable[files.Block]) -> FileRecord:
    digest = hashlib.sha256()
    with files.create(path) as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # what was hashed is still in the processor's cache when written
                block = data[start : start + _BLOCK]
                digest.update(block)
                files.write(file, block)
        files.sync(file)
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())
