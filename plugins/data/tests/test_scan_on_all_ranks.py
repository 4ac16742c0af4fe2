"""A scan by several ranks: the same index as by one, files opened by all of them, and errors that reach every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image

from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import BUILT_IN_METADATA, BUILT_IN_STORAGES, Catalog, DatasetSpec
from smalti.data.scan import parts
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import TransientStorageError
from smalti.errors import ExitCode
from smalti.parallel.collective import RankError
from smalti.parallel.gloo import GlooCommunicator
from smalti.types import World
from smalti_data.all_ranks import listing
from smalti_data.all_ranks.scan import scan_on_all_ranks, work_on
from smalti_data.all_ranks.shared import SharedCatalog, shared_rows
from smalti_data.all_ranks.tasks import Handed, Task
from smalti_objectives.plugin import COLUMNS
from support.forked_ranks import forked_processes

CATALOG = Catalog.of(BUILT_IN_STORAGES, BUILT_IN_METADATA, COLUMNS)


class Counting(LocalStorage):
    """A folder that counts what is opened, and does not answer for some of it."""

    def __init__(self, root: Path, away: str = "") -> None:
        super().__init__(root)
        self.opened, self.away = 0, away
        self.lists_ranges = True

    def read_range(self, key: str, start: int, length: int) -> bytes:
        if key == self.away:
            raise TransientStorageError("the server is away")
        self.opened += 1
        return super().read_range(key, start, length)


def spec_of(folder: Path) -> DatasetSpec:
    entry = {
        "id": "pets",
        "instance_data_dir": str(folder),
        "caption_strategy": "filename",
        "mask_path": str(folder / ".masks"),
    }
    (spec,), _ = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
    return spec


def scan(folder: Path, cache: Path, storage: LocalStorage) -> DatasetIndex:
    spec = spec_of(folder)
    columns = CATALOG.open_columns(spec, [spec]).values()
    return build_index(spec, storage, CATALOG.open_source(spec, storage), cache, columns=columns)


def scan_on_two_ranks(folder: Path, cache: Path, away: str) -> tuple[int, str, int]:
    """How many files were opened here, and the error with its exit code."""
    parts.PART_ROWS = listing.FIRST_ROWS = listing.CHUNK_ROWS = 8
    communicator = GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=dist.group.WORLD)
    spec, storage = spec_of(folder), Counting(folder, away)
    source, columns = CATALOG.open_source(spec, storage), CATALOG.open_columns(spec, [spec]).values()

    def scan_all(handed: Handed) -> None:
        listed = SharedCatalog(directory=cache.parent, handed=handed).open_source(spec, storage)
        build_index(spec, storage, listed, cache, make_rows=partial(shared_rows, handed), columns=columns)

    def work(task: Task) -> None:
        work_on(task, spec, storage, source, cache.parent)

    try:
        scan_on_all_ranks(communicator, scan_all, work)
    except RankError as error:
        return storage.opened, str(error), error.for_user().exit_code
    return storage.opened, "", 0


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    (tmp_path / "pets").mkdir()
    for number in range(60):
        Image.new("RGB", (8 + number, 8)).save(tmp_path / f"pets/{number:04}.png")
    (tmp_path / "pets/0007.png").write_bytes(b"damaged")
    (tmp_path / "pets/.masks").mkdir()
    for number in range(0, 60, 3):
        (tmp_path / f"pets/.masks/{number:04}.png").write_bytes(b"m" * number)
    return tmp_path / "pets"


def test_ranks_share_a_scan_and_an_error_reaches_all(pets: Path, tmp_path: Path) -> None:
    alone = scan(pets, tmp_path / "alone.arrow", LocalStorage(pets))
    with forked_processes() as ranks:
        (failed, failed_too) = ranks.run(scan_on_two_ranks, pets, tmp_path / "failed/pets.arrow", "0030.png")
        (first, error, _), (second, _, _) = ranks.run(scan_on_two_ranks, pets, tmp_path / "both/pets.arrow", "")
        (again, _, _), (again_too, _, _) = ranks.run(scan_on_two_ranks, pets, tmp_path / "both/pets.arrow", "")
    together = scan(pets, tmp_path / "both/pets.arrow", storage := Counting(pets))

    assert all("the server is away" in message for _, message, _ in (failed, failed_too))
    assert (failed[2], failed_too[2]) == (ExitCode.UNAVAILABLE, ExitCode.UNAVAILABLE)
    assert error == ""
    assert min(first, second) > 0
    assert first + second == 60
    assert (again + again_too, storage.opened) == (1, 1)  # the damaged image
    assert list(together.keys()) == list(alone.keys())
    assert (together.digests, together.quarantined) == (alone.digests, alone.quarantined)
    assert [path.name for path in (tmp_path / "both").iterdir()] == ["pets.arrow"]
    assert [(together.value("mask", row), together.value("mask_size", row)) for row in (2, 3)] == [("", 0), ("0003.png", 3)]
