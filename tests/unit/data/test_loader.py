"""The batches of a rank: the same data however ranks share it, errors that surface, threads that end."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smalti.data.batch_check import BatchShape
from smalti.data.dataset import Dataset
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog, DatasetSpec
from smalti.data.loader import Batch, Loader
from smalti.data.prepared import DataRules, PreparedData, build_datasets, load_datasets, prepare
from smalti.data.scan.quarantine import allowed_errors
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import TransientStorageError
from smalti.errors import PreflightError
from smalti.models.size_conditioning import SizeConditioning
from smalti.types import World


def fill(folder: Path, count: int, size: tuple[int, int] = (16, 16)) -> Path:
    """Images whose colour is their number, with two captions each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", size, (number, 2 * number, 0)).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"number {number}\npicture {number}")
    return folder


def specs_of(*folders: Path, **values: object) -> tuple[DatasetSpec, ...]:
    entries = [{"id": folder.name, "instance_data_dir": str(folder), **values} for folder in folders]
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16))
    assert not problems
    return specs


def data_of(*folders: Path, batch: int = 4, budget: float = 0.01, **values: object) -> PreparedData:
    datasets = build_datasets(specs_of(*folders, **values), Catalog())
    shape = BatchShape(train_batch_size=batch, ranks=1, accumulation=1)
    return prepare(datasets, DataRules(seed=3, shape=shape, alignment=8, error_budget=budget))


def seen(batches: list[Batch]) -> list[tuple[int, str, str]]:
    """Number, key and caption of every sample."""
    return [
        visit
        for batch in batches
        for micro in batch.micro
        for visit in zip(micro.numbers, micro.keys, micro.captions, strict=True)
    ]


def take(data: PreparedData, count: int, micro_batch: int = 4, **options: object) -> list[Batch]:
    world = options.pop("world", World())
    with Loader(data, world=world, micro_batch=micro_batch, **options) as loader:  # type: ignore[arg-type]
        return list(islice(loader, count))


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return fill(tmp_path / "pets", 20)


def test_pixels_captions_and_keys_belong_together(pets: Path) -> None:
    for batch in take(data_of(pets), 10):
        for pixels, caption, key in zip(batch.micro[0].pixels, batch.micro[0].captions, batch.micro[0].keys, strict=True):
            number = int(key.removeprefix("pets/").removesuffix(".png"))
            expected = torch.tensor([number, 2 * number, 0]) / 127.5 - 1
            assert torch.equal(pixels, expected[:, None, None].expand(3, 16, 16))
            assert caption in (f"number {number}", f"picture {number}")


def test_batches_are_fp32_on_the_device_of_the_rank(pets: Path) -> None:
    micro = take(data_of(pets), 1)[0].micro[0]

    assert (micro.pixels.dtype, micro.pixels.device.type, micro.pixels.shape) == (torch.float32, "cpu", (4, 3, 16, 16))


@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4)])
def test_every_way_to_share_a_batch_sees_the_same_samples(pets: Path, layout: tuple[int, int, int]) -> None:
    ranks, accumulation, micro_batch = layout
    data = data_of(pets)
    expected = seen(take(data, 8))
    found: list[tuple[int, str, str]] = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks)
        found += seen(take(data, 8, micro_batch, world=world, accumulation=accumulation))

    assert sorted(found) == expected


def test_ranks_lie_side_by_side_in_every_micro_batch(pets: Path) -> None:
    batch = take(data_of(pets, batch=12), 3, 2, world=World(rank=1, size=3), accumulation=2)[2]

    assert [micro.numbers for micro in batch.micro] == [(24 + 2, 24 + 3), (24 + 8, 24 + 9)]


def test_a_resumed_loader_continues_exactly(pets: Path) -> None:
    data = data_of(pets)
    whole = take(data, 12)
    resumed = take(data, 5, position=7)

    assert seen(resumed) == seen(whole[7:])
    assert [batch.position for batch in resumed] == list(range(7, 12))


def test_the_number_of_threads_does_not_matter(pets: Path) -> None:
    data = data_of(pets)

    assert seen(take(data, 30, workers=1, prefetch=1)) == seen(take(data, 30, workers=4, prefetch=8))


def test_all_captions_of_a_picture_come_up(pets: Path) -> None:
    captions = Counter(caption for _, key, caption in seen(take(data_of(pets), 100)) if key == "pets/007.png")

    assert set(captions) == {"number 7", "picture 7"}


def test_random_cuts_differ_between_visits_and_not_between_runs(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    ramp = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (16, 1, 3))
    for number in range(4):
        Image.fromarray(ramp).save(tmp_path / f"wide/{number}.png")
        (tmp_path / f"wide/{number}.txt").write_text("a ramp")
    data = data_of(tmp_path / "wide", crop=True, crop_style="random")
    first, second = (torch.cat([batch.micro[0].pixels for batch in take(data, 4, cache_bytes=room)]) for room in (0, 1 << 20))

    assert torch.equal(first, second)
    assert len({float(image[0, 0, 0]) for image in first}) > 8


def test_a_frame_says_where_the_cut_was(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    ramp = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (32, 1, 3))
    for number in range(4):
        Image.fromarray(ramp).save(tmp_path / f"wide/{number}.png")
        (tmp_path / f"wide/{number}.txt").write_text("a ramp")
    for micro in (batch.micro[0] for batch in take(data_of(tmp_path / "wide", crop=True, crop_style="random"), 4)):
        for pixels, frame in zip(micro.pixels, micro.size_conditioning, strict=True):
            # Scaled to half its size, the ramp rises by two levels a pixel, from a half.
            shown = round((float(pixels[0, 0, 8]) + 1) * 127.5)
            assert (frame.width, frame.height, frame.top) == (200, 32, 0)
            assert abs(shown - (2 * (frame.left + 8) + 0.5)) <= 1


def test_a_picture_that_is_not_cut_has_its_frame_at_the_corner(pets: Path) -> None:
    size_conditioning = {frame for batch in take(data_of(pets), 3) for frame in batch.micro[0].size_conditioning}

    assert size_conditioning == {SizeConditioning(width=16, height=16, left=0, top=0)}


def test_datasets_share_buckets_and_repeats_weigh_them(tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a", 6), fill(tmp_path / "b", 3)
    specs = (*specs_of(a), *specs_of(b, repeats=1))
    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, Catalog()), DataRules(seed=1, shape=shape, alignment=8))
    keys = Counter(key for _, key, _ in seen(take(data, 3)))

    assert keys == {f"a/00{k}.png": 1 for k in range(6)} | {f"b/00{k}.png": 2 for k in range(3)}


def test_a_picture_that_breaks_is_replaced_by_the_next_and_recorded(pets: Path) -> None:
    data = data_of(pets)
    healthy = seen(take(data, 5))
    (pets / "004.png").write_bytes(b"broken")
    with Loader(data, world=World(), micro_batch=4) as loader:
        found = seen(list(islice(loader, 5)))
        items = loader.errors.items

    assert [item.key for item in items] == ["004.png"]
    assert items[0].reason == "not a readable image: unknown format"
    place = next(place for place, visit in enumerate(healthy) if visit[1] == "pets/004.png")
    order = data.order.batch(place // 4)
    following = next(data.order.replacements(order, place % 4))
    assert found[place][:2] == (healthy[place][0], f"pets/{following:03}.png")
    assert [a for i, a in enumerate(found) if i != place] == [a for i, a in enumerate(healthy) if i != place]


class Planned:
    """Passes of datasets with a trigger word, and a second caption in every other batch."""

    def needs(self, position: int, datasets: Collection[DatasetSpec]) -> frozenset[str]:
        second = {"policy|caption=other", "base|caption=other"} if position % 2 else set()
        return frozenset({"base"} | second if any(spec.trigger_word for spec in datasets) else second)

    def second_caption(self, name: str, caption: str, dataset: DatasetSpec, number: int) -> str:
        return f"{name} {caption} {dataset.id} {number}"


def test_all_ranks_know_which_forward_passes_there_are(tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a", 20), fill(tmp_path / "b", 3)
    specs = (*specs_of(a), *specs_of(b, trigger_word="zyx"))
    shape = BatchShape(train_batch_size=8, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, Catalog()), DataRules(seed=1, shape=shape, alignment=8))
    (b / "001.png").write_bytes(b"broken")
    ranks = [take(data, 12, 2, world=World(rank=rank, size=2), accumulation=2, passes=Planned()) for rank in (0, 1)]
    passes = [
        (batches[0].position, micro)
        for batches in zip(*ranks, strict=True)
        for micro in zip(*(batch.micro for batch in batches), strict=True)
    ]
    for position, parts in passes:
        chosen = [any(key.startswith("b/") for key in micro.keys) for micro in parts]
        second = {"policy|caption=other", "base|caption=other"} if position % 2 else set()
        assert [micro.needs for micro in parts] == [second | {"base"} if any(chosen) else second] * 2
        for micro in parts:
            assert [spec.id for spec in micro.datasets] == [key.partition("/")[0] for key in micro.keys]
            visits = zip(micro.captions, micro.datasets, micro.numbers, strict=True)
            wanted = tuple(f"other {caption} {spec.id} {number}" for caption, spec, number in visits)
            assert {name: each.captions for name, each in micro.second_captions.items()} == (
                {"other": wanted} if second else {}
            )
    assert len({parts[0].needs for _, parts in passes}) == 4
    assert "b/001.png" not in {key for _, parts in passes for micro in parts for key in micro.keys}


def test_one_broken_picture_is_put_up_with_and_a_second_one_asks_for_a_stop(pets: Path, tmp_path: Path) -> None:
    data = data_of(pets, budget=0.05)
    (pets / "004.png").write_bytes(b"broken")
    log = tmp_path / "rank-0.jsonl"
    with Loader(data, world=World(), micro_batch=4, errors=data.error_budget(log)) as loader:
        list(islice(loader, 10))
        assert loader.budget_exhausted is None
    (pets / "005.png").unlink()
    with Loader(data, world=World(), micro_batch=4, errors=data.error_budget(log)) as loader:
        list(islice(loader, 10))
        assert loader.budget_exhausted is not None
        assert "2 samples cannot be used, more than the error budget of 1" in loader.budget_exhausted
    assert len(log.read_text().splitlines()) == 3


def test_a_dataset_that_went_away_asks_for_a_stop_and_raises_nothing(pets: Path) -> None:
    data = data_of(pets)
    shutil.rmtree(pets)
    with Loader(data, world=World(), micro_batch=4) as loader:
        batch = next(loader)

    assert loader.budget_exhausted is not None
    assert batch.micro[0].pixels.shape == (4, 3, 16, 16)


def test_a_bucket_with_nothing_readable_asks_for_a_stop(tmp_path: Path) -> None:
    folder = fill(tmp_path / "pets", 1)
    data = data_of(folder, budget=10, repeats=3)
    (folder / "000.png").write_bytes(b"broken")
    with Loader(data, world=World(), micro_batch=4) as loader:
        next(loader)

    assert (loader.budget_exhausted or "").startswith("no image of bucket 16x16 can be read; ")


class Away(LocalStorage):
    def read(self, key: str) -> bytes:
        raise TransientStorageError("the server is away")


def test_an_error_of_the_storage_comes_out_where_batches_are_taken(pets: Path) -> None:
    data = data_of(pets)
    away = tuple(Dataset(spec=one.spec, storage=Away(pets), source=one.source, index=one.index) for one in data.datasets)
    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    with (
        Loader(prepare(away, DataRules(seed=1, shape=shape)), world=World(), micro_batch=4) as loader,
        pytest.raises(TransientStorageError) as caught,
    ):
        next(loader)

    assert any(entry.name == "read" for entry in caught.traceback)


class Slow(LocalStorage):
    reads = 0

    def read(self, key: str) -> bytes:
        Slow.reads += 1
        time.sleep(0.05)
        return super().read(key)


@pytest.fixture
def slow(pets: Path) -> PreparedData:
    data = data_of(pets)
    Slow.reads = 0
    datasets = tuple(Dataset(spec=one.spec, storage=Slow(pets), source=one.source, index=one.index) for one in data.datasets)
    shape = BatchShape(train_batch_size=20, ranks=1, accumulation=1)
    return prepare(datasets, DataRules(seed=1, shape=shape))


def test_closing_waits_for_a_picture_and_not_for_a_batch(slow: PreparedData) -> None:
    before = threading.active_count()
    loader = Loader(slow, world=World(), micro_batch=20, workers=2)
    time.sleep(0.02)
    loader.close()
    loader.close()

    assert Slow.reads < 10  # half a batch
    assert threading.active_count() == before


def test_no_more_than_the_wanted_batches_are_made_ahead(pets: Path) -> None:
    data = data_of(pets)
    Slow.reads = 0
    datasets = tuple(Dataset(spec=one.spec, storage=Slow(pets), source=one.source, index=one.index) for one in data.datasets)
    shape = BatchShape(train_batch_size=1, ranks=1, accumulation=1)
    one_by_one = prepare(datasets, DataRules(seed=1, shape=shape))
    with Loader(one_by_one, world=World(), micro_batch=1, prefetch=3, workers=2, cache_bytes=0):
        time.sleep(0.4)

        assert Slow.reads == 3


def test_a_closed_loader_gives_no_batch(pets: Path) -> None:
    loader = Loader(data_of(pets), world=World(), micro_batch=4)
    loader.close()

    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_batch_that_does_not_divide_is_a_mistake_of_the_caller(pets: Path) -> None:
    with pytest.raises(ValueError, match="not the effective batch"):
        Loader(data_of(pets), world=World(size=3), micro_batch=1)


def test_pictures_that_fit_in_memory_are_read_once(pets: Path) -> None:
    data = data_of(pets)
    Slow.reads = 0
    datasets = tuple(Dataset(spec=one.spec, storage=Slow(pets), source=one.source, index=one.index) for one in data.datasets)
    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    take(prepare(datasets, DataRules(seed=1, shape=shape)), 20, workers=1)

    assert Slow.reads == 20


def test_ranks_that_load_what_another_built_get_the_same_order(pets: Path, tmp_path: Path) -> None:
    rules = DataRules(seed=1, shape=BatchShape(train_batch_size=4, ranks=1, accumulation=1), alignment=8)
    built = prepare(build_datasets(specs_of(pets), Catalog(), tmp_path / "run"), rules)
    loaded = prepare(load_datasets(specs_of(pets), Catalog(), tmp_path / "run"), rules)

    assert loaded.identity == built.identity
    assert seen(take(loaded, 10)) == seen(take(built, 10))


def test_pictures_that_have_another_size_than_when_they_were_scanned_count_as_broken(pets: Path) -> None:
    data = data_of(pets, budget=2)
    for number in (3, 7):
        Image.new("RGB", (32, 16)).save(pets / f"{number:03}.png")
    with Loader(data, world=World(), micro_batch=4) as loader:
        keys = {key for _, key, _ in seen(list(islice(loader, 5)))}
        assert keys.isdisjoint({"pets/003.png", "pets/007.png"})
        assert [item.reason for item in loader.errors.items] == ["its size is 32x16, and was 16x16 when it was scanned"] * 2
        assert loader.budget_exhausted is None
    Image.new("RGB", (16, 32)).save(pets / "011.png")
    with Loader(data, world=World(), micro_batch=4) as loader:
        list(islice(loader, 5))
        assert "3 samples cannot be used" in (loader.budget_exhausted or "")


def test_too_many_broken_files_stop_the_run_before_it_starts(pets: Path) -> None:
    for number in range(19):
        (pets / f"{number:03}.txt").unlink()

    with pytest.raises(
        PreflightError, match=r"19 samples cannot be used, and the error budget allows 1(.|\n)*missing file 000\.txt"
    ):
        data_of(pets)


def test_a_count_as_budget_puts_up_with_that_many(pets: Path) -> None:
    for number in range(5):
        (pets / f"{number:03}.txt").unlink()
    data = data_of(pets, budget=5)

    assert data.unusable == len(data.quarantined) == 5
    assert "5 samples are unusable" in data.notices[0]


@pytest.mark.parametrize(
    ("budget", "samples", "allowed"), [(0.01, 165, 1), (0.01, 1000, 10), (0.5, 3, 1), (7, 3, 7), (0, 99, 0)]
)
def test_a_budget_is_a_share_or_a_count(budget: float, samples: int, allowed: int) -> None:
    assert allowed_errors(budget, samples) == allowed


def test_random_aspects_are_those_of_the_list_and_stay_the_same(pets: Path) -> None:
    for number in range(20):
        Image.effect_noise((16 + number, 16), 50).convert("RGB").save(pets / f"{number:03}.png")
    data, again = (data_of(pets, batch=1, crop_aspect="random", crop_aspect_buckets=[1.0, 4.0]) for _ in range(2))

    assert [str(count.bucket) for count in data.counts] == ["16x16", "32x8"]
    assert sum(count.total for count in data.counts) == 20
    assert data.counts == again.counts


def test_several_resolutions_are_scanned_once(pets: Path, tmp_path: Path) -> None:
    specs = specs_of(pets, resolution=[16, 32, 64])
    for folder in (None, tmp_path / "run"):
        scanned: list[str] = []

        def progress(name: str, scanned: list[str] = scanned) -> Callable[[int, int | None], None]:
            scanned.append(name)
            return lambda done, total: None

        datasets = build_datasets(specs, Catalog(), folder, progress)
        assert scanned == ["pets@16"]
        assert [one.index.dataset for one in datasets] == ["pets@16", "pets@32", "pets@64"]
    loaded = load_datasets(specs, Catalog(), tmp_path / "run")
    assert [list(one.index.keys()) for one in loaded] == [list(datasets[0].index.keys())] * 3


def test_several_resolutions_share_images_and_captions(pets: Path) -> None:
    data = data_of(pets, resolution=[16, 32])
    batches = take(data, data.order.epoch_start(1))

    count = Counter(key.rpartition("/")[2] for _, key, _ in seen(batches))
    assert set(count.values()) == {2}
    assert {(batch.bucket.width, key.partition("/")[0]) for batch in batches for key in batch.micro[0].keys} == {
        (16, "pets@16"),
        (32, "pets@32"),
    }


def test_small_pictures_are_left_out_with_a_notice(pets: Path) -> None:
    fill(pets / "small", 3, (4, 4))
    data = data_of(pets, minimum_image_size=8)

    assert data.counts[0].total == 20
    assert data.notices == ("dataset pets: 3 of 23 images are skipped, because they are smaller than minimum_image_size",)


def test_nothing_left_to_train_on_is_an_error(pets: Path) -> None:
    with pytest.raises(PreflightError, match="no dataset has an image that can be trained on"):
        data_of(pets, minimum_image_size=8000)


def test_short_buckets_get_repeats_when_allowed(pets: Path) -> None:
    datasets = build_datasets(specs_of(pets), Catalog())
    shape = BatchShape(train_batch_size=8, ranks=4, accumulation=1)
    data = prepare(datasets, DataRules(seed=1, shape=shape, alignment=8, short_buckets="repeat"))

    assert [(len(part.rows), part.copies) for part in data.order.buckets[0].parts] == [(20, 2)]
    assert "repeats raised to 1" in data.notices[0]


def test_images_of_a_dataset_are_seen_in_proportion_to_its_probability(pets: Path, tmp_path: Path) -> None:
    entries = [
        {"id": "pets", "instance_data_dir": str(pets), "probability": 0.4},
        {"id": "art", "instance_data_dir": str(fill(tmp_path / "art", 10)), "probability": 0.1, "repeats": 1},
    ]
    specs, _ = parse_datasets(entries, where="data.json", defaults=DataDefaults(resolution=16))
    shape = BatchShape(train_batch_size=5, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, Catalog()), DataRules(seed=1, shape=shape, alignment=8))
    seen = [sample for position in range(data.order.epoch_start(2)) for sample in data.order.batch(position).samples.tolist()]

    assert data.order.epoch_start(2) == 10  # 20 + 10 / 4 * 2 samples in an epoch
    assert [seen.count(sample) for sample in range(30)] == [1] * 10 + [2] * 20
    assert (data.settings["art"]["probability"], data.settings["pets"]["probability"]) == (0.1, 0.4)
    assert data.counts[0].total == 40
