"""Encoding before training: what is encoded and what is not, the same samples as without it, broken images, kills."""

import json
import os
import resource
import shutil
import signal
from itertools import chain, islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import smalti_cache.pending
import smalti_cache.text_keys
import smalti_cache.wanted
from smalti.config.resolution import resolve
from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.encoded import Encoded
from smalti.data.loader import Loader
from smalti.data.prepared import DataRules, build_datasets, prepare
from smalti.data.storage.local import LocalStorage
from smalti.errors import PreflightError, UserError
from smalti.parallel.gloo import GlooCommunicator
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir import Phases
from smalti.types import World
from smalti_cache.contents import cached_encodings_in
from smalti_cache.earlier import earlier_latents_key, earlier_text_key
from smalti_cache.embedding_cache import CachedTexts
from smalti_cache.encode_ahead import AheadEncoder
from smalti_cache.keys import single_key
from smalti_cache.pack import PackBuilder
from smalti_cache.places import CacheFolders, CachePlace
from smalti_cache.store import PackStore
from smalti_testing.tiny import TinyFamily
from support.cache_parts import earlier_part
from support.colour_profiles import DISPLAY_P3, SRGB, rgb_profile
from support.forked_ranks import forked_processes

BATCH = 4


class Encoding(TinyFamily):
    """A family whose encoders cost something: it notes what they are asked for. Latents are pixels under a version number."""

    def __init__(self, version: int = 1, stop_after: int = 1000) -> None:
        super().__init__()
        self.version, self.stop_after = version, stop_after
        self.texts: list[str] = []
        self.images = 0

    def encode_captions(self, captions):
        self.texts += captions
        return super().encode_captions(captions)

    def encode_images(self, pixels):
        self.images += len({row.numpy().tobytes() for row in pixels})
        if self.images > self.stop_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return pixels * self.version

    def encoder_identity(self, kind):
        return {"version": self.version}

    def release_encoder(self, kind):
        pass


@pytest.fixture
def pets(tmp_path):
    return draw(tmp_path / "pets")


def draw(folder: Path, count: int = 20) -> Path:
    """Images that are ramps from left to right, 200 x 32 pixels, each of its own green."""
    folder.mkdir()
    ramp = np.zeros((32, 200, 3), dtype=np.uint8)
    ramp[:, :, 0] = np.arange(200)
    for number in range(count):
        ramp[:, :, 1] = 10 * number
        Image.fromarray(ramp).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"image {number // 2}")
    return folder


def data_of(folder, *, seed=3, budget=0.01, **values):
    entry = {"id": "pets", "instance_data_dir": str(folder), "crop": True, "crop_style": "random", **values}
    specs, problems = parse_datasets([entry], where="", defaults=DataDefaults(resolution=16))
    assert not problems
    shape = BatchShape(train_batch_size=BATCH, ranks=1, accumulation=1)
    return prepare(build_datasets(specs, Catalog()), DataRules(seed=seed, shape=shape, alignment=8, error_budget=budget))


def test_rows_that_are_not_trained_on_have_no_bucket(pets):
    Image.new("RGB", (20, 20)).save(pets / "z.png")
    (pets / "z.txt").write_text("too small")
    data = data_of(pets, minimum_image_size=24)

    assert smalti_cache.wanted.bucket_numbers(data, 0, 0, 20).tolist() == [0] * 20
    assert smalti_cache.wanted.bucket_numbers(data, 0, 18, 99).tolist() == [0, 0, -1]


def encode(family, data, cache, ranks=None, latents=("pets",), own_texts=None) -> Encoded:
    schema = schema_of(load_plugins(Selection(only=("cache",))))
    config = resolve(schema, [f"--train_batch_size={BATCH}"], environment={})
    place = CachePlace(folder=cache)
    folders = CacheFolders(texts=place, latents=dict.fromkeys(latents, place), own_texts=own_texts or {})
    encoder = AheadEncoder(config=config, family=family, folders=folders)
    alone = GlooCommunicator(world=World(), group=None)
    return encoder.encode(data, ranks or alone, cache.parent, Phases(), ["a pet"], [])


def pack_of(entries) -> PackBuilder:
    pack = PackBuilder()
    for key, entry in entries.items():
        pack.add(key, entry)
    return pack


def batches(data, encoded=None, *, world=None, count=10):
    encoded, world = encoded or Encoded(), world or World()
    with Loader(data, world=world, micro_batch=BATCH // world.size, latents=encoded.latents, texts=encoded.texts) as loader:
        return [batch.micro[0] for batch in islice(loader, count)]


def seen(some):
    return [visit for micro in some for visit in zip(micro.numbers, micro.keys, micro.captions, strict=True)]


def test_what_is_there_is_not_encoded_again_and_what_changed_is(pets, tmp_path):
    first, second, other = Encoding(), Encoding(), Encoding(version=2)
    encode(first, data_of(pets), tmp_path / "cache")
    assert (first.images, set(first.texts)) == (20, {"", "a pet", *(f"image {number}" for number in range(10))})

    shutil.copy(pets / "01.png", pets / "00.png")
    (pets / "05.txt").write_text("another")
    encoded = encode(second, data_of(pets, seed=4), tmp_path / "cache")
    assert (second.images, set(second.texts)) == (1, {"another"})

    changed = encode(other, data_of(pets), tmp_path / "cache")
    assert (other.images, len(set(other.texts))) == (20, 13)
    pair = [batches(data_of(pets), each, count=1)[0].latents for each in (encoded, changed)]
    assert torch.equal(2 * pair[0], pair[1])


def test_texts_of_a_dataset_are_in_the_place_of_its_own_and_read_from_there(pets, tmp_path):
    entries = [{"id": name, "instance_data_dir": str(pets), "crop": True} for name in ("cats", "dogs")]
    entries[1] |= {"instance_prompt": "a dog", "caption_strategy": "instanceprompt"}
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16))
    assert not problems
    shape = BatchShape(train_batch_size=BATCH, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, Catalog()), DataRules(seed=3, shape=shape, alignment=8))
    common, own = CachePlace(folder=tmp_path / "common"), CachePlace(folder=tmp_path / "own")
    alone = encode(Encoding(), data, tmp_path / "alone", latents=("cats", "dogs"))
    family = Encoding()
    encoded = encode(family, data, common.folder, latents=("cats", "dogs"), own_texts={"dogs": own})
    assert [each.contents().entries for each in cached_encodings_in(own.folder)] == [1]
    assert sorted(each.contents().entries for each in cached_encodings_in(common.folder) if each.kind == "texts") == [12]
    for one, other in zip(batches(data, encoded), batches(data, alone), strict=True):
        assert one.captions == other.captions
        assert all(torch.equal(rows, other.conditioning[name]) for name, rows in one.conditioning.items())
    again = Encoding()
    encode(again, data, common.folder, latents=("cats", "dogs"), own_texts={"dogs": own})
    assert again.texts == []


def test_variants_of_captions_are_encoded_before_and_visits_have_no_others(pets, tmp_path):
    for text in pets.glob("*.txt"):
        text.write_text("a, b, c, d\n[trigger] at night")
    values = {"caption_shuffle": {"count": 3}, "caption_weights": [2, 1], "trigger_word": "zwx"}
    family, data = Encoding(), data_of(pets, **values)
    encoded = encode(family, data, tmp_path / "cache")
    found = seen(batches(data, encoded, count=20))
    shares = [seen(batches(data, encoded, world=World(rank=rank, size=2), count=20)) for rank in (0, 1)]

    captions = {caption for *_, caption in found}
    assert captions == set(family.texts) - {"", "a pet"} == set(data.datasets[0].texts(0))
    assert len(captions) == 4
    assert sorted(chain(*shares)) == sorted(found)


@pytest.mark.parametrize("style", ["corner", "random"])
def test_both_variants_of_a_flipped_image_are_encoded_and_visits_choose(pets, tmp_path, style):
    family, plain = Encoding(), data_of(pets, crop_style=style)
    data = data_of(pets, crop_style=style, flip_probability=0.5)
    encode(family, plain, tmp_path / "cache")
    encoded = encode(family, data, tmp_path / "cache")
    bucket = data.order.buckets[0].bucket
    assert family.images == 40  # the first 20 were there

    found = batches(data, encoded, count=100)
    latents = {key: set() for micro in found for key in micro.keys}
    for micro in found:
        for key, latent, size in zip(micro.keys, micro.latents, micro.size_conditioning, strict=True):
            latents[key].add((latent.numpy().tobytes(), size.left))
    assert {len(each) for each in latents.values()} == {2}
    for sample in range(20):
        image, (left, _) = encoded.latents.image(sample, bucket)
        other, (right, _) = encoded.latents.image(sample, bucket, flipped=True)
        assert np.array_equal(other, image[:, :, ::-1])
        assert left + right + bucket.width == 100  # the width when it covers the bucket


def test_a_share_of_visits_sees_the_image_mirrored_without_a_cache(pets):
    whole = [data_of(pets, crop_style="center", flip_probability=share) for share in (0, 1)]
    plain, mirrored = (torch.cat([micro.pixels for micro in batches(data)]) for data in whole)
    some = torch.cat([micro.pixels for micro in batches(data_of(pets, crop_style="center", flip_probability=0.3), count=60)])
    rising = (some[:, 0, 0, -1] > some[:, 0, 0, 0]).float().mean()

    assert torch.equal(mirrored, plain.flip(-1))
    assert rising == pytest.approx(0.7, abs=0.1)


def test_another_size_before_the_crop_is_encoded_anew(pets, tmp_path):
    limits = {"maximum_image_size": 20, "target_downsample_size": 64}  # the images are 200 x 32, as large as 80 x 80
    again = [Encoding() for _ in range(4)]
    for encoding, values in zip(again, ({}, limits, limits, {**limits, "maximum_image_size": 90}), strict=True):
        encode(encoding, data_of(pets, **values), tmp_path / "cache")

    assert [encoding.images for encoding in again] == [20, 20, 0, 0]


def test_samples_are_those_of_a_run_without_and_of_two_ranks_also_where_pictures_are_broken(pets, tmp_path):
    data = data_of(pets, budget=5, crop_style="center")
    for name in ("03.png", "04.png"):
        (pets / name).write_bytes((pets / name).read_bytes()[:60])
    encoded = encode(Encoding(), data, tmp_path / "cache")
    without, alone = batches(data), batches(data, encoded)
    halves = [batches(data, encoded, world=World(rank=rank, size=2)) for rank in (0, 1)]

    assert seen(alone) == seen(without)
    assert [visit for pair in zip(*halves, strict=True) for visit in seen(pair)] == seen(without)
    assert all(torch.equal(one.latents, other.pixels) for one, other in zip(alone, without, strict=True))
    listed = (tmp_path / "encoding.rank-0.quarantine.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["key"] for line in listed) == ["03.png", "04.png"]


def test_more_broken_pictures_than_the_budget_stop_before_training(pets, tmp_path):
    data = data_of(pets, budget=1)
    for name in ("03.png", "04.png"):
        (pets / name).write_bytes(b"")
    with pytest.raises(PreflightError, match="2 samples cannot be used, more than the error budget of 1"):
        encode(Encoding(), data, tmp_path / "cache")


def test_a_random_cut_is_drawn_once_for_all_runs_and_its_frame_says_where(pets, tmp_path, capsys):
    runs = []
    for seed in (3, 4):
        data = data_of(pets, seed=seed)
        runs.append({})
        for micro in batches(data, encode(Encoding(), data, tmp_path / "cache")):
            for key, latents, frame in zip(micro.keys, micro.latents, micro.size_conditioning, strict=True):
                # Scaled to half its size, the ramp rises by two levels a pixel, from a half.
                assert abs(round((float(latents[0, 0, 8]) + 1) * 127.5) - (2 * (frame.left + 8) + 0.5)) <= 1
                assert runs[-1].setdefault(key, frame) == frame
    assert runs[0] == runs[1]
    assert len({frame.left for frame in runs[0].values()}) > 10
    assert "random crops are chosen once per image" in capsys.readouterr().err


def test_a_part_that_cannot_be_read_is_named_kept_and_encoded_again(pets, tmp_path, caplog):
    encode(Encoding(), data_of(pets), tmp_path / "cache")
    [part] = (tmp_path / "cache").glob("latents-*/*.safetensors")
    os.truncate(part, part.stat().st_size - 1)
    again = Encoding()
    encode(again, data_of(pets), tmp_path / "cache")
    assert again.images == 20
    assert f"{part} cannot be read" in caplog.text
    assert part.exists()


def test_a_folder_that_cannot_be_written_to_and_a_full_disk_are_told_with_the_way_out(pets, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r"cannot cache encoded images(.|\n)*--cache_dir"):
        encode(Encoding(), data_of(pets), tmp_path / "file" / "cache")

    (tmp_path / "full").mkdir()
    store = PackStore(LocalStorage(tmp_path / "full"), "")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write 1 entries to .*full(.|\n)*free space"):
            store.put(pack_of({(1, 2): {"rows": torch.rand(2000)}}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_cache_of_an_earlier_version_is_used(pets, tmp_path, capsys):
    data = data_of(pets, flip_probability=0.5)
    encoded = encode(Encoding(), data, tmp_path / "now")
    texts = ["a pet", "", *(f"image {number}" for number in range(10))]
    entries = {
        "texts": {earlier_text_key(text, negative=False): encoded.texts.store.get(CachedTexts.key(text)) for text in texts}
    }
    bucket, entries["latents"] = data.order.buckets[0].bucket, {}
    for sample, flipped in product(range(20), (False, True)):
        latents, offset = encoded.latents.get(sample, bucket, flipped=flipped)
        key = earlier_latents_key(data, 0, sample, bucket, flipped=flipped)
        entries["latents"][key] = encoded.latents.entry(latents, offset)
    for folder in (tmp_path / "now").iterdir():
        (tmp_path / "then" / folder.name).mkdir(parents=True)
        earlier_part(tmp_path / "then" / folder.name / "part.safetensors", entries[folder.name.partition("-")[0]])
    capsys.readouterr()
    for _ in range(2):
        again = Encoding()
        found = encode(again, data, tmp_path / "then")
        assert (again.images, again.texts) == (0, [])
        assert all(
            torch.equal(one.latents, other.latents)
            for one, other in zip(batches(data, found), batches(data, encoded), strict=True)
        )
    assert capsys.readouterr().err.count("has entries of an earlier version of smalti, which are used") == 2  # latents, texts


def test_a_folder_that_was_moved_is_not_encoded_again_and_another_one_is(pets, tmp_path):
    first = encode(Encoding(), data_of(pets), tmp_path / "cache")
    expected = batches(data_of(pets), first)
    moved = pets.rename(tmp_path / "elsewhere")
    again = Encoding()
    data = data_of(moved)
    found = encode(again, data, tmp_path / "cache")
    assert again.images == 0
    assert all(torch.equal(one.latents, other.latents) for one, other in zip(batches(data, found), expected, strict=True))

    one, other, *_ = (path for path in sorted(moved.glob("*.png")) if path.stat().st_size == 166)
    status = one.stat()
    one.write_bytes(other.read_bytes())  # now with other pixels, and the same name, size and time as before
    os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = Encoding()
    encode(changed, data_of(moved), tmp_path / "cache")
    assert changed.images == 1


@pytest.mark.parametrize("adopted", [False, True])
def test_entries_under_keys_with_the_place_of_the_dataset_are_used(pets, tmp_path, adopted):
    """Of the version before this one, whose cache may refer to parts of a still earlier one."""
    data = data_of(pets, flip_probability=0.5)
    encoded = encode(Encoding(), data, tmp_path / "now")
    bucket, located, parts = data.order.buckets[0].bucket, {}, {}
    for sample, flipped in product(range(20), (False, True)):
        index = data.datasets[0].index
        name, etag = index.key(sample), index.etag(sample)
        key = single_key(
            ("latents", "3", str(pets), "random", "pets"), name, etag, bucket.width, bucket.height, 0, 0, int(flipped)
        )
        located[key] = encoded.latents.entry(*encoded.latents.get(sample, bucket, flipped=flipped))
        parts[earlier_latents_key(data, 0, sample, bucket, flipped=flipped)] = located[key]
    [folder] = (tmp_path / "now").glob("latents-*")
    then = tmp_path / "then" / folder.name
    then.mkdir(parents=True)
    if adopted:
        earlier_part(then / "part.safetensors", parts)
    PackStore(LocalStorage(then), "").put(pack_of(located))
    for _ in range(2):
        again = Encoding()
        found = encode(again, data, tmp_path / "then")
        assert again.images == 0
        assert len(list(then.glob("*.safetensors"))) == 2 + adopted
        assert all(
            torch.equal(one.latents, other.latents)
            for one, other in zip(batches(data, found), batches(data, encoded), strict=True)
        )


@pytest.mark.parametrize("content", [True, False], ids=["opened", "sizes from a table"])
def test_latents_for_which_colour_profiles_were_ignored_are_used_for_images_without_one(tmp_path, capsys, content):
    """Of 20 images, two have a profile of Display P3, a PNG and a WebP file of 100 KB, and one that of sRGB."""
    pets = draw(tmp_path / "pets")
    for number, name, profile in ((3, "03.png", DISPLAY_P3), (5, "05.webp", DISPLAY_P3), (6, "06.png", SRGB)):
        with Image.open(pets / f"{number:02}.png") as image:
            image.load()
        (pets / f"{number:02}.png").unlink()
        image.save(pets / name, icc_profile=rgb_profile(profile), xmp=bytes(100_000), lossless=True)
    data = data_of(pets)
    encoded = encode(Encoding(), data, tmp_path / "now")
    bucket, before = data.order.buckets[0].bucket, {}
    index = data.datasets[0].index
    for sample in range(20):
        values = index.key(sample), index.etag(sample), bucket.width, bucket.height, 0, 0, 0
        digest = index.content(sample) if content else 0
        origin = 0 if content else encoded.latents._origins[0]
        key = single_key(("latents", "4", "random", "pets"), *values, digest, origin)
        latents, offset = encoded.latents.get(sample, bucket)
        before[key] = encoded.latents.entry(latents if sample not in (3, 5) else latents * 0, offset)
    [folder] = (tmp_path / "now").glob("latents-*")
    then = tmp_path / "then" / folder.name
    then.mkdir(parents=True)
    PackStore(LocalStorage(then), "").put(pack_of(before))
    capsys.readouterr()
    for expected in (2, 0):
        again = Encoding()
        found = encode(again, data, tmp_path / "then")
        assert again.images == expected
        for sample in range(20):
            assert torch.equal(found.latents.get(sample, bucket)[0], encoded.latents.get(sample, bucket)[0])
    assert capsys.readouterr().err.count("looking for colour profiles") == 1


def test_a_damaged_entry_ends_the_run_and_is_encoded_again_by_the_next(pets, tmp_path):
    data = data_of(pets)
    encoded = encode(Encoding(), data, tmp_path / "cache")
    [pack] = (tmp_path / "cache").glob("latents-*/*.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1] + b"\x99")
    with Loader(data, world=World(), micro_batch=BATCH, latents=encoded.latents, texts=encoded.texts) as loader:
        for _ in islice(loader, 6):
            pass
        assert f"{pack} is damaged at byte" in loader.budget_exhausted
    again = Encoding()
    assert len(batches(data, encode(again, data, tmp_path / "cache"), count=6)) == 6
    assert again.images == 1


def encode_on_two_ranks(folder: Path, cache: Path, stop_after: int) -> tuple[int, list]:
    """Images encoded here, and what this rank then sees of its batches. Parts are written after every batch."""
    smalti_cache.pending.PACK_BYTES = 1
    world = World(rank=dist.get_rank(), size=2)
    family, data = Encoding(stop_after=stop_after), data_of(folder)
    encoded = encode(family, data, cache, GlooCommunicator(world=world, group=dist.group.WORLD))
    return family.images, seen(batches(data, encoded, world=world))


def test_ranks_share_the_work_and_what_was_written_before_a_kill_is_not_encoded_again(pets, tmp_path):
    with forked_processes() as ranks:
        (first, some), (second, others) = ranks.run(encode_on_two_ranks, pets, tmp_path / "shared", 1000)
        killed = ranks.attempt(encode_on_two_ranks, pets, tmp_path / "killed", 9)
    assert first + second == 20
    assert min(first, second) > 0
    assert sorted(some + others) == sorted(seen(batches(data_of(pets))))

    assert all(result.error for result in killed)
    [folder] = (tmp_path / "killed").glob("latents-*")
    store = PackStore(LocalStorage(folder), "")
    store.refresh()
    written = len(store)
    again = Encoding()
    encoded = encode(again, data_of(pets), tmp_path / "killed")
    assert 0 < written < 20
    assert again.images == 20 - written
    assert seen(batches(data_of(pets), encoded)) == seen(batches(data_of(pets)))


def test_many_texts_are_found_in_one_pass_over_all_of_them(pets, tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.wanted, "_RANGE", 3)
    monkeypatch.setattr(smalti_cache.text_keys, "_IN_MEMORY", 5)
    hashed, keys = [], CachedTexts.keys

    def noted(texts):
        hashed.extend(texts)
        return keys(texts)

    monkeypatch.setattr(CachedTexts, "keys", staticmethod(noted))
    family = Encoding()
    encode(family, data_of(pets), tmp_path / "cache")
    assert len(hashed) == 20
    assert len(family.texts) == 12 + -12 % BATCH  # each once, and what fills the last batch
    assert sorted(set(family.texts)) == sorted({"", "a pet", *(f"image {number}" for number in range(10))})
    assert len(batches(data_of(pets), encode(Encoding(), data_of(pets), tmp_path / "cache"))) == 10


def test_what_a_run_has_cached_can_be_verified_and_removed(pets, tmp_path):
    encode(Encoding(), data_of(pets), tmp_path / "cache")
    caches = cached_encodings_in(tmp_path / "cache")
    assert [(each.kind, each.problem, each.verify().missing) for each in caches] == [("latents", "", 0), ("texts", "", 0)]
    for each in caches:
        each.remove()
    assert list((tmp_path / "cache").iterdir()) == []
