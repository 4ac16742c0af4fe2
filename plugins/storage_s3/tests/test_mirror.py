"""Mirrors of runs: what a mirror offers after every crash, who may write to it, and what a download accepts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from smalti import CheckpointError, UserError
from smalti.checkpoint import RANKING, SUSPECT, CheckpointStore, verify
from smalti.checkpoint.format.state_file import State
from smalti.config import RunOptions
from smalti.data import LocalStorage, Storage, StorageError, StoredFile
from smalti.errors import InUseError
from smalti.rundir import RunDirectory, acquire
from smalti_data.remote.checkpoints import RemoteRun
from smalti_data.remote.place import RemotePlace
from smalti_storage_s3.mirror.ownership import Lease, SupersededError, owner_of
from smalti_storage_s3.mirror.place import Access
from smalti_storage_s3.mirror.pulling import pull
from smalti_storage_s3.mirror.restoring import restore
from smalti_storage_s3.mirror.upload import CLAIM, Uploader, held
from support.checkpoints import TENSORS, flip, make
from support.killing import kill_after

OTHER = TENSORS[:-1] + b"\x01"


class Crashed(BaseException):
    """The process died here."""


class FragileStorage(LocalStorage):
    """A folder whose user dies before or after a numbered operation that changes it. 0: never."""

    def __init__(self, root: Path, dies_at: int = 0, *, after: bool = False) -> None:
        super().__init__(root)
        self.operations = 0
        self._dies_at, self._after = dies_at, after

    def _operation(self, call, *arguments):
        self.operations += 1
        if self.operations == self._dies_at and not self._after:
            raise Crashed
        result = call(*arguments)
        if self.operations == self._dies_at:
            raise Crashed
        return result

    def write(self, key: str, data: bytes) -> None:
        self._operation(super().write, key, data)

    def upload(self, path: Path, key: str) -> None:
        self._operation(super().upload, path, key)

    def create(self, key: str, data: bytes) -> bool:
        return self._operation(super().create, key, data)

    def delete(self, key: str) -> None:
        self._operation(super().delete, key)


class ForgetfulStorage(LocalStorage):
    """A folder that loses the first file of each of so many uploads of a checkpoint, after it has accepted it."""

    def __init__(self, root: Path, losses: int) -> None:
        super().__init__(root)
        self.losses = losses

    def upload(self, path: Path, key: str) -> None:
        super().upload(path, key)
        if key.endswith("model/a.safetensors") and self.losses:
            self.losses -= 1
            self.delete(key)


class PlainStorage(Storage):
    """Only what every storage has: no deletion, no creating once, no transfer of files."""

    def __init__(self, root: Path) -> None:
        self._inner = LocalStorage(root)

    @property
    def location(self) -> str:
        return self._inner.location

    def stat(self, key: str) -> StoredFile:
        return self._inner.stat(key)

    def read(self, key: str) -> bytes:
        return self._inner.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.read_range(key, start, length)

    def write(self, key: str, data: bytes) -> None:
        self._inner.write(key, data)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        return self._inner.list(prefix, after=after)


@pytest.fixture
def place(tmp_path) -> Path:
    folder = tmp_path / "nas"
    folder.mkdir()
    return folder


def new_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    acquire(run).close()
    run.config_file.write_text("seed = 1\n")
    run.launch_file.write_text("{}")
    (run.data / "trained" / "abc").mkdir(parents=True)
    (run.data / "trained" / "abc" / "photos.arrow").write_bytes(b"index")
    return run


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return new_run(tmp_path / "run")


def uploader(run: RunDirectory, storage, *, keep: int | None = 2) -> Uploader:
    record = run.record()
    assert record is not None
    return Uploader(run=run, lease=Lease.take(storage, record.id), keep=keep)


def names(storage) -> list[str]:
    return [each.name for each in RemoteRun(storage).published()]


def offered(place: Path, target: Path) -> int | None:
    """The step that a fresh node would resume from; its files are compared with their digests. None: no checkpoint."""
    storage = LocalStorage(place)
    if not names(storage):
        return None
    path = pull(RemoteRun(storage), RunDirectory(target), "latest", lambda _sentence: None)
    result = verify(path)
    assert result.ok, result.problems
    return result.step


def test_a_run_that_was_copied_is_there_in_an_empty_directory_with_what_a_resume_reads(run, place, tmp_path):
    make(run.checkpoints, 5)
    uploaded = uploader(run, LocalStorage(place)).push_newest()
    assert uploaded is not None
    assert (uploaded.name, uploaded.sent) == ("step-00000005", uploaded.size)
    fresh = RunDirectory(tmp_path / "fresh")
    pull(RemoteRun(LocalStorage(place)), fresh, "latest", lambda _sentence: None)
    assert (fresh.record(), fresh.config_file.read_text()) == (run.record(), "seed = 1\n")
    assert (fresh.data / "trained" / "abc" / "photos.arrow").read_bytes() == b"index"
    assert CheckpointStore(fresh.checkpoints).latest() == fresh.checkpoints / "step-00000005"
    assert not (fresh.path / "mirror" / "incoming").exists()
    assert list((run.path / "mirror").iterdir()) == []


def test_a_mirror_is_a_run_directory(run, place):
    make(run.checkpoints, 5)
    uploader(run, LocalStorage(place)).push_newest()
    copy = RunDirectory(place)
    assert copy.record() == run.record()
    assert CheckpointStore(copy.checkpoints).latest() == place / "checkpoints" / "step-00000005"


def test_what_is_there_is_not_sent_again(run, place):
    make(run.checkpoints, 5)
    uploads = uploader(run, LocalStorage(place))
    uploads.push_newest()
    again = uploads.push_newest()
    assert again is not None
    assert (again.name, again.sent) == ("step-00000005", 0)


def test_a_step_that_was_trained_again_gets_a_name_of_its_own_and_counts(run, place, tmp_path):
    storage = LocalStorage(place)
    make(run.checkpoints, 5)
    uploader(run, storage).push_newest()
    shutil.rmtree(run.checkpoints)
    make(run.checkpoints, 5, tensors=OTHER)
    uploader(run, storage).push_newest()
    assert names(storage) == ["step-00000005", "step-00000005.2"]
    path = pull(RemoteRun(storage), RunDirectory(tmp_path / "fresh"), "latest", lambda _sentence: None)
    assert (path / "model" / "a.safetensors").read_bytes() == OTHER


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_process_that_dies_at_any_operation_leaves_the_newest_or_the_one_before(run, place, tmp_path, after):
    uploads = uploader(run, LocalStorage(place), keep=2)
    for step in (1, 2):
        make(run.checkpoints, step)
        uploads.push_newest()
        uploads.rotate()
    make(run.checkpoints, 3)
    begun = tmp_path / "begun"
    shutil.copytree(place, begun)
    number, seen, done = 1, [], False
    while not done:
        shutil.rmtree(place)
        shutil.copytree(begun, place)
        storage = FragileStorage(place, number, after=after)
        try:
            dying = uploader(run, storage)
            dying.push_newest()
            dying.rotate()
            done = True
        except Crashed:
            pass
        target = tmp_path / f"fresh-{number}"
        seen.append(offered(place, target))
        resumed = uploader(run, LocalStorage(place))
        resumed.push_newest()
        resumed.rotate()
        assert names(LocalStorage(place)) == ["step-00000002", "step-00000003"]
        assert offered(place, tmp_path / f"then-{number}") == 3
        left = {key.key.split("/")[1] for key in LocalStorage(place).list("checkpoints/")}
        assert left == {"step-00000002", "step-00000003"}
        number += 1
    assert seen == sorted(seen)
    assert set(seen) == {2, 3}


def test_a_process_that_is_killed_at_random_leaves_what_it_acknowledged(run, place, tmp_path):
    chance = random.Random(15)
    step = 0

    def upload_for_ever(acknowledge) -> None:
        number, uploads = step, uploader(run, LocalStorage(place))
        while True:
            number += 1
            make(run.checkpoints, number)
            uploads.push_newest()
            uploads.rotate()
            acknowledge(number)

    for number in range(12):
        acknowledged = kill_after(chance.uniform(0, 0.06), upload_for_ever)
        found = offered(place, tmp_path / f"fresh-{number}")
        assert found is not None
        assert acknowledged <= found <= acknowledged + 1, f"seed 15, kill {number}"
        step = CheckpointStore(run.checkpoints).all()[-1].step


def test_old_checkpoints_are_removed_oldest_first_and_suspect_ones_do_not_count(run, place):
    storage = LocalStorage(place)
    uploads = uploader(run, storage, keep=2)
    for step, flags in ((1, ()), (2, ()), (3, (SUSPECT,)), (4, ())):
        make(run.checkpoints, step, flags=flags)
        uploads.push_newest()
    assert uploads.rotate() == ["step-00000001"]
    assert names(storage) == ["step-00000002", "step-00000003", "step-00000004"]


def test_the_best_checkpoints_stay_in_the_mirror_and_come_back_with_their_ranking(run, place, tmp_path):
    """And with the losses that were measured, and those of each visit of an image."""
    storage = LocalStorage(place)
    uploads = uploader(run, storage, keep=1)
    losses = ("evaluations/00000001.npy", "visits/2x4x1/0.bin", "visits/2x4x1/1.bin")
    for name in losses:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(name)
    for step in (1, 2, 3):
        make(run.checkpoints, step)
        (run.checkpoints / RANKING).write_text('{"keep": 1, "steps": [1, 2, 3]}')
        uploads.push_newest()
        uploads.rotate()
    assert names(storage) == ["step-00000001", "step-00000003"]
    assert RemotePlace("s3://bucket/run", lambda _url: LocalStorage(place)).best() == "step-00000001"
    fresh = RunDirectory(tmp_path / "fresh")
    path = pull(RemoteRun(storage), fresh, "best", lambda _sentence: None)
    assert path == fresh.checkpoints / "step-00000001" == CheckpointStore(fresh.checkpoints).resolve("best")
    assert [(fresh.path / name).read_text() for name in losses] == list(losses)


def test_a_suspect_checkpoint_is_taken_only_where_there_is_no_other(run, place, tmp_path):
    make(run.checkpoints, 3, flags=(SUSPECT,))
    uploads = uploader(run, LocalStorage(place), keep=None)
    uploads.push_newest()
    assert offered(place, tmp_path / "suspect") == 3
    for step, flags in ((4, ()), (5, (SUSPECT,))):
        make(run.checkpoints, step, flags=flags)
        uploads.push_newest()
    mirror = RemoteRun(LocalStorage(place))
    assert [each.step for each in mirror.find("latest")] == [4, 5, 3]
    assert [each.step for each in mirror.find("5")] == [5], "by its step it can be had"
    assert offered(place, tmp_path / "fresh") == 4


def test_nothing_is_removed_while_the_newest_is_damaged(run, place):
    storage, said = LocalStorage(place), []
    uploads = uploader(run, storage, keep=1)
    uploads.report = said.append
    for step in (1, 2):
        make(run.checkpoints, step)
        uploads.push_newest()
    flip(place / "checkpoints" / "step-00000002" / "model" / "a.safetensors")
    assert uploads.rotate() == []
    assert names(storage) == ["step-00000001", "step-00000002"]
    assert "does not match its digest" in said[0]
    make(run.checkpoints, 3)
    uploads.push_newest()
    assert uploads.rotate() == ["step-00000001"]
    assert names(storage) == ["step-00000002", "step-00000003"]


def test_what_another_program_has_put_there_is_neither_removed_nor_added_to(run, place):
    storage = LocalStorage(place)
    make(place / "checkpoints", 1)
    (place / "checkpoints" / "step-00000003").mkdir()
    (place / "checkpoints" / "step-00000003" / "notes.txt").write_text("mine")
    uploads = uploader(run, storage, keep=1)
    for step in (2, 3):
        make(run.checkpoints, step)
        uploads.push_newest()
    assert uploads.rotate() == ["step-00000002"]
    assert names(storage) == ["step-00000001", "step-00000003.2"]
    assert (place / "checkpoints" / "step-00000003" / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_is_skipped_with_the_reason_and_refused_by_its_step(run, place, tmp_path):
    uploads, said = uploader(run, LocalStorage(place)), []
    for step in (1, 2):
        make(run.checkpoints, step)
        uploads.push_newest()
    flip(place / "checkpoints" / "step-00000002" / "model" / "a.safetensors")
    mirror = RemoteRun(LocalStorage(place))
    path = pull(mirror, RunDirectory(tmp_path / "fresh"), "latest", said.append)
    assert path.name == "step-00000001"
    assert any("skipped step-00000002" in each and "digest" in each for each in said)
    with pytest.raises(CheckpointError, match=r"model/a\.safetensors does not match its digest"):
        pull(mirror, RunDirectory(tmp_path / "other"), "2", said.append)
    with pytest.raises(UserError, match="no checkpoint 7") as refused:
        pull(mirror, RunDirectory(tmp_path / "other"), "7", said.append)
    assert "step-00000001, step-00000002" in refused.value.fix


def test_an_interrupted_download_continues_and_trusts_no_file_that_it_finds(run, place, tmp_path):
    make(run.checkpoints, 1)
    uploader(run, LocalStorage(place)).push_newest()
    incoming = tmp_path / "fresh" / "mirror" / "incoming" / "step-00000001" / "model"
    incoming.mkdir(parents=True)
    (incoming / "a.safetensors").write_bytes(OTHER)
    assert offered(place, tmp_path / "fresh") == 1


def test_a_mirror_belongs_to_one_run(run, place, tmp_path):
    storage = LocalStorage(place)
    uploader(run, storage)
    other = new_run(tmp_path / "other")
    with pytest.raises(InUseError, match="is the mirror of another run"):
        uploader(other, storage)
    record = run.record()
    assert record is not None
    owner = owner_of(storage)
    assert owner is not None
    assert owner.run == record.id


def test_of_two_launches_of_a_run_the_later_one_writes(run, place):
    storage = LocalStorage(place)
    make(run.checkpoints, 1)
    first = uploader(run, storage)
    second = uploader(run, storage)
    with pytest.raises(SupersededError, match="another launch of this run"):
        first.push_newest()
    assert names(storage) == []
    second.push_newest()
    assert names(storage) == ["step-00000001"]


def test_two_launches_at_once_get_different_numbers(run, place):
    record = run.record()
    assert record is not None
    taken = [Lease.take(LocalStorage(place), record.id).number for _ in range(5)]
    assert taken == [1, 2, 3, 4, 5]
    assert [each.key for each in LocalStorage(place).list("launches/")] == [
        "launches/00000004.json",
        "launches/00000005.json",
    ]


def test_an_upload_that_was_believed_dead_cannot_mix_its_files_into_a_checkpoint(run, place, tmp_path):
    """It continues after another launch has published the same step with other contents."""
    storage = LocalStorage(place)
    make(run.checkpoints, 1)
    slow = FragileStorage(place, 0)
    late = uploader(run, slow)
    with held(run.path, run.checkpoints / "step-00000001") as files:
        entry = CheckpointStore(run.checkpoints).all()[0]
        assert entry.manifest is not None
        target, _ = late._claim(RemoteRun(slow), entry.manifest)
        shutil.rmtree(run.checkpoints)
        make(run.checkpoints, 1, tensors=OTHER)
        uploader(run, storage).push_newest()
        late._send(files, entry.manifest, target)
    assert offered(place, tmp_path / "fresh") == 1
    assert (tmp_path / "fresh/checkpoints/step-00000001/model/a.safetensors").read_bytes() == OTHER


@pytest.mark.parametrize("losses", [1, 2])
def test_what_a_server_loses_after_it_was_accepted_is_sent_again(run, place, tmp_path, losses):
    make(run.checkpoints, 1)
    uploader(run, ForgetfulStorage(place, losses)).push_newest()
    assert offered(place, tmp_path / "fresh") == 1


def test_a_checkpoint_is_not_published_while_a_file_is_missing(run, place):
    make(run.checkpoints, 1)
    with pytest.raises(StorageError, match="is not there, and the store has accepted it 3 times"):
        uploader(run, ForgetfulStorage(place, 9)).push_newest()
    assert not RemoteRun(LocalStorage(place)).published()


def test_a_checkpoint_that_is_rotated_away_during_its_upload_is_uploaded(run, place, tmp_path):
    make(run.checkpoints, 1)
    with held(run.path, run.checkpoints / "step-00000001") as files:
        shutil.rmtree(run.checkpoints)
        assert verify(files).ok
    assert not files.exists()


def test_a_damaged_checkpoint_of_the_run_is_not_copied(run, place):
    said = []
    uploads = uploader(run, LocalStorage(place))
    uploads.report = said.append
    make(run.checkpoints, 1)
    flip(make(run.checkpoints, 2) / "model" / "a.safetensors")
    uploaded = uploads.push_newest()
    assert uploaded is not None
    assert uploaded.name == "step-00000001"
    assert "does not match its digest" in said[0]


def test_a_storage_that_can_only_read_and_write_is_enough(run, place, tmp_path):
    storage = PlainStorage(place)
    uploads = uploader(run, storage, keep=1)
    for step in (1, 2):
        make(run.checkpoints, step)
        uploads.push_newest()
    assert uploads.rotate() == []
    assert names(storage) == ["step-00000001", "step-00000002"]
    assert CLAIM in RemoteRun(storage).all()[0].sizes
    path = pull(RemoteRun(storage), RunDirectory(tmp_path / "fresh"), "latest", lambda _sentence: None)
    assert path.name == "step-00000002"


def test_a_new_run_with_another_seed_is_refused_before_anything_is_downloaded(run, place, tmp_path):
    make(run.checkpoints, 1, state=State(step=1, trainer={"seed": 42}).encode())
    uploader(run, LocalStorage(place)).push_newest()
    fresh = tmp_path / "fresh"
    with pytest.raises(CheckpointError, match="its seed is 42, and this one has 7") as refused:
        restore(str(place), Access(), RunOptions(output_dir=fresh, seed=7))
    assert refused.value.fix == "choose another --checkpoint_mirror; or continue that run with --seed=42"
    assert not fresh.exists()
    assert "step-00000001" in (restore(str(place), Access(), RunOptions(output_dir=fresh, seed=42)) or "")
