"""In an order of blocks the latents of a block are read at once, and each visit still gets its own."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smalti.config.resolution import resolve
from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.loader import Loader
from smalti.data.prepared import DataRules, build_datasets, prepare
from smalti.data.storage.protocol import IntegrityError
from smalti.parallel.gloo import GlooCommunicator
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir import Phases
from smalti.types import World
from smalti_cache.block_order import BlockOrder
from smalti_cache.encode_ahead import AheadEncoder
from smalti_cache.places import CacheFolders, CachePlace
from smalti_testing.tiny import TinyFamily

BATCH, SIZE, IMAGES = 8, 4, 160


class Encoding(TinyFamily):
    def encode_images(self, pixels):
        return pixels

    def encoder_identity(self, kind):
        return {}

    def release_encoder(self, kind):
        pass


@pytest.fixture
def pets(tmp_path):
    (tmp_path / "pets").mkdir()
    for number in range(IMAGES):
        pixels = np.full((16, 16 if number % 4 else 32, 3), number, dtype=np.uint8)
        pixels[:, ::2, 2] = 255
        Image.fromarray(pixels).save(tmp_path / "pets" / f"{number:03}.png")
    return tmp_path / "pets"


BLOCKS = BlockOrder(SIZE, 1)


def encoded(folder: Path, passes=BLOCKS, ahead=1 << 30, **keys):
    """The data, and the latents of all images, with the reads of their packs."""
    entry = {
        "id": "pets",
        "instance_data_dir": str(folder),
        "caption_strategy": "instanceprompt",
        "instance_prompt": "a",
        **keys,
    }
    specs, problems = parse_datasets([entry], where="", defaults=DataDefaults(resolution=16))
    assert not problems
    shape = BatchShape(train_batch_size=BATCH, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, Catalog()), DataRules(seed=3, shape=shape, alignment=8, passes=passes))
    schema = schema_of(load_plugins(Selection(only=("cache",))))
    config = resolve(schema, [f"--train_batch_size={BATCH}", "--text_cache_disable"], environment={})
    place = CachePlace(folder=folder.parent / "cache")
    folders = CacheFolders(texts=place, latents={"pets": place}, read_ahead=ahead)
    encoder = AheadEncoder(config=config, family=Encoding(), folders=folders)
    latents = encoder.encode(data, GlooCommunicator(world=World(), group=None), folder.parent, Phases(), [], []).latents
    [store] = latents.stores
    reads, read = [], store.read

    def counted(name, start, length):
        reads.append((name, start, length))
        return read(name, start, length)

    store.read = counted
    return data, latents, reads


def visits(data, latents, ranks=1, count=40):
    """The key and the latents of all visits, of all ranks."""
    found = []
    for rank in range(ranks):
        with Loader(data, world=World(rank=rank, size=ranks), micro_batch=BATCH // ranks, latents=latents) as loader:
            for batch in islice(loader, count):
                [micro] = batch.micro
                found += zip(micro.numbers, micro.keys, micro.latents, strict=True)
    return sorted(found, key=lambda visit: visit[0])


@pytest.mark.parametrize(("ranks", "flips"), [(1, 0.0), (4, 0.0), (2, 0.5)])
def test_a_block_is_read_once_and_visits_have_their_latents(pets, ranks, flips):
    data, latents, reads = encoded(pets, flip_probability=flips)
    assert len(data.order.buckets) == 2
    found = visits(data, latents, ranks)
    ahead, _ = len(reads), reads.clear()
    plain, others, each = encoded(pets, None, flip_probability=flips)
    assert len({key for _, key, _ in found[:IMAGES]}) == IMAGES
    for number, key, tensor in found:
        sample = int(key.removeprefix("pets/").removesuffix(".png"))
        bucket = next(one.bucket for one in data.order.buckets if sample in one.samples)
        flipped = data.sample(sample).is_flipped(data.order.seed, number)
        assert torch.equal(tensor, others.get(sample, bucket, flipped=flipped)[0])
    each.clear()
    visits(plain, others, ranks)
    assert ahead <= 0.45 * len(each)


def test_what_waits_is_bounded_and_read_again_if_it_was_dropped(pets, caplog):
    data, latents, reads = encoded(pets, ahead=3000)
    found = visits(data, latents)
    assert latents._blocks._bytes <= 3000 + BATCH * SIZE * 16 * 32 * 12
    assert "raise --data_order_gb" in caplog.text
    assert len(found) == 40 * BATCH
    assert len(reads) > 40


def test_a_damaged_entry_does_not_hide_its_neighbours(pets):
    data, latents, _ = encoded(pets)
    [pack] = (pets.parent / "cache").glob("latents-*/*.safetensors")
    content = bytearray(pack.read_bytes())
    content[-10] ^= 1
    pack.write_bytes(content)
    bad = []
    for one in data.order.buckets:
        for sample in one.samples.tolist():
            with suppress(IntegrityError):
                latents.get_many([(sample, False)], one.bucket)
                continue
            bad.append(sample)
    assert len(bad) == 1
