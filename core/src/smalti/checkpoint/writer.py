"""Saving: every rank writes its share, then one rename makes the checkpoint visible.

The files have the layout of torch's sharded safetensors checkpoints, but are written here: digests are taken while writing
instead of by reading everything again, several files go out at a time and a failure of any of them counts, tensors need be
neither contiguous nor of separate memory, and the same state always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.checkpoint.agreement import RankError, together
from smalti.checkpoint.manifest import GROUPS, STATE, FileRecord, Manifest
from smalti.checkpoint.planning import Pieces, check_whole, decode_pieces, divide, encode_pieces, local_pieces
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.store import CheckpointStore
from smalti.checkpoint.tensorfile import ITEM_SIZES, encode_header
from smalti.errors import CheckpointError, ExitCode, UserError
from smalti.files import fsync_directory
from smalti.parallel import Parallel, named_state
from smalti.types import Checkpoint

_THREADS = 4
_SMALLEST_FILE = 64 * 2**20
_LARGEST_FILE = 512 * 2**20
_BLOCK = 4 * 2**20


class SaveError(UserError):
    """A checkpoint could not be written. Older ones are intact. `errno` is the system's number, such as ENOSPC, if any."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, fix: str = "", errno: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.errno = errno


def save(root: Path, snapshot: Snapshot, parallel: Parallel) -> Checkpoint:
    """Write a checkpoint below `root`, the same directory for all ranks. *Collective*; the same answer on every rank.

    When it returns, the checkpoint is complete, visible and on the disk. Saving a step that is already there in the same
    state returns the older checkpoint; in another state, makes a new one that counts from then on. The tensors must not
    change while this runs. Raises SaveError on all ranks when any of them failed; then nothing has become visible.
    """
    started = time.perf_counter()
    try:
        with ExitStack() as cleanup:
            path, size = _save(CheckpointStore(root), snapshot, parallel, cleanup)
    except RankError as failure:
        message = f"cannot save step {snapshot.step} in {root}: {failure}"
        raise SaveError(message, fix=failure.fix, errno=failure.errno) from failure
    return Checkpoint(step=snapshot.step, path=path, size=size, seconds=time.perf_counter() - started)


def _save(store: CheckpointStore, snapshot: Snapshot, parallel: Parallel, cleanup: ExitStack) -> tuple[Path, int]:
    main = parallel.world.is_main
    tensors = _tensors(snapshot)

    def begin() -> str:
        if not main:
            return ""
        cleanup.enter_context(store.exclusive())
        prepared = store.prepare(snapshot.step)
        cleanup.callback(store.discard, prepared)  # by then it has become the checkpoint, or is of no use
        return str(prepared)

    directory = Path(together(parallel, begin)[0])

    def plan() -> str:
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not visible on this node", fix="put --output_dir on storage that all nodes share"
            )
        return encode_pieces(local_pieces(tensors))

    held = [decode_pieces(text) for text in together(parallel, plan)]
    rank = parallel.world.rank

    def write() -> str:
        check_whole(held, tensors)
        mine = {name: held[rank][name] for name in divide(held)[rank]}
        records = _write_tensors(directory, mine, tensors, rank)
        if main:
            records[STATE] = _write_file(directory / STATE, [_state(snapshot)])
        return json.dumps({name: vars(record) for name, record in records.items()})

    parts = [json.loads(text) for text in together(parallel, write)]
    files = {name: FileRecord(**record) for part in parts for name, record in part.items()}
    manifest = Manifest(
        step=snapshot.step,
        world_size=parallel.world.size,
        files=files,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plugins=snapshot.plugins,
        config_digest=snapshot.config_digest,
        flags=snapshot.flags,
    )
    path = together(parallel, lambda: str(store.publish(directory, manifest)) if main else "")[0]
    return Path(path), manifest.size


def _tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """All tensors, under "GROUP/NAME"."""
    groups: Mapping[str, Mapping[str, Tensor]] = {
        "model": snapshot.state.model,
        "optimizer": named_state(snapshot.state.moments),
        "ema": snapshot.ema or {},
    }
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


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

    files = {
        f"{group}/rank-{rank:05d}-part-{number:05d}.safetensors": names
        for group in GROUPS
        for number, names in enumerate(_parts(pieces, group))
    }
    with ThreadPoolExecutor(max_workers=min(_THREADS, os.cpu_count() or 1)) as pool:
        records = dict(pool.map(write, files.items()))
    for group in GROUPS:
        fsync_directory(directory / group)
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


def _write_file(path: Path, contents: Iterable[bytes | memoryview]) -> FileRecord:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # what was hashed is still in the processor's cache when written
                block = data[start : start + _BLOCK]
                digest.update(block)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())
