"""Nodes that share no file system: a mirror carries their parts of a checkpoint to node 0, and whole checkpoints to them.

Importing this module imports torch.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from smalti import CheckpointError, UserError
from smalti.checkpoint import CheckpointStore, Entry, parse_checkpoint_name, read_manifest
from smalti.data import Storage
from smalti.parallel import Communicator, RankError, run_on_all_ranks, run_on_main_rank
from smalti.rundir import RunDirectory
from smalti_data.remote.checkpoints import RemoteRun
from smalti_storage_s3.mirror.ownership import Lease
from smalti_storage_s3.mirror.place import Access, open_place
from smalti_storage_s3.mirror.pulling import fetch_checkpoint
from smalti_storage_s3.mirror.upload import Uploader

PARTS = "parts/"
_INTERVAL = 5.0


class MirrorRelay:
    """Carries parts of a checkpoint through `parts/` of a mirror."""

    def __init__(self, place: str, access: Access) -> None:
        self._place = place
        self._access = access

    @property
    def _storage(self) -> Storage:
        return open_place(self._place, self._access, create=True)

    def send(self, path: Path, name: str) -> None:
        self._storage.upload(path, PARTS + name)

    def fetch(self, name: str, path: Path) -> None:
        self._storage.download(PARTS + name, path)

    def clear(self) -> None:
        storage = self._storage
        if storage.deletes:
            for stored in list(storage.list(PARTS)):
                storage.delete(stored.key)


def bring(place: str, access: Access, run: RunDirectory, source: Path, parallel: Communicator) -> None:
    """Bring the checkpoint at `source`, which the main rank sees, to the same path on all nodes. *Collective*."""
    try:
        seen = run_on_all_ranks(parallel, lambda: "seen" if source.is_dir() else "")
        if all(seen):
            return
        name = run_on_main_rank(parallel, lambda: _publish(place, access, run, source))
        leads = not seen[parallel.world.rank] and parallel.world.local_rank == 0
        with ThreadPoolExecutor(1, "smalti-mirror") as pool:
            work = pool.submit(_fetch, place, access, run, source, name) if leads else None
            while not all(run_on_all_ranks(parallel, lambda: _look(work))):
                pass
    except RankError as failure:
        raise CheckpointError(f"{source} does not reach all nodes: {failure}", fix=failure.fix) from failure


def _look(work: Future[None] | None) -> str:
    """Wait for the work for a while. Returns "" if it has not ended. Raises its error."""
    if work is None:
        return "ended"
    finished, _ = wait([work], timeout=_INTERVAL)
    if not finished:
        return ""
    work.result()
    return "ended"


def _publish(place: str, access: Access, run: RunDirectory, source: Path) -> str:
    """Make sure that the checkpoint is in the mirror; returns its name there."""
    record, found = run.record(), parse_checkpoint_name(source.name)
    if record is None or found is None or not source.resolve().is_relative_to(run.checkpoints.resolve()):
        raise UserError(
            f"{source} is not in {run.checkpoints}, so other nodes cannot have it",
            fix="copy it to the same path on all nodes, or resume from a checkpoint of this run",
        )
    step, revision = found
    entry = Entry(step=step, revision=revision, path=source, manifest=read_manifest(source), problem="")
    lease = Lease.take(open_place(place, access, create=True), record.id)
    return Uploader(run=run, lease=lease).push(source, entry).name


def _fetch(place: str, access: Access, run: RunDirectory, source: Path, name: str) -> None:
    """Download a checkpoint to `source`, and remove those that were brought here before."""
    mirror = RemoteRun(open_place(place, access))
    [checkpoint] = [each for each in mirror.find(name) if each.name == name]
    folder, manifest = fetch_checkpoint(mirror, checkpoint, run, lambda _sentence: None)
    store = CheckpointStore(run.checkpoints)
    with store.exclusive():
        store.publish(folder, manifest).rename(source)
        store.rotate(1)
    shutil.rmtree(folder.parent, ignore_errors=True)
