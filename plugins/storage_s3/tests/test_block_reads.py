"""Latents in a bucket: how many requests an epoch of training makes."""

from itertools import islice

import numpy as np
from PIL import Image

from smalti.config import resolve
from smalti.data import Catalog, Loader, build_datasets, catalog_of, parse_datasets, prepare
from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults
from smalti.data.prepared import DataRules
from smalti.parallel import GlooCommunicator
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.rundir import Phases
from smalti.types import World
from smalti_cache.block_order import BlockOrder
from smalti_cache.encode_ahead import AheadEncoder
from smalti_cache.places import CacheFolders, CachePlace
from smalti_testing import TinyFamily

IMAGES, BATCH, SIZE = 256, 16, 8


class Encoding(TinyFamily):
    """Latents of 64 KB, so that reading what is between two of them is no matter."""

    def encode_images(self, pixels):
        return pixels.mean((1, 2, 3)).reshape(-1, 1, 1, 1).expand(-1, 4, 64, 64)

    def encoder_identity(self, kind):
        return {}

    def release_encoder(self, kind):
        pass


def test_an_epoch_in_blocks_makes_a_fraction_of_the_requests(store, options, tmp_path):
    (tmp_path / "pets").mkdir()
    for number in range(IMAGES):
        Image.fromarray(np.full((16, 16, 3), number // 2, dtype=np.uint8)).save(tmp_path / "pets" / f"{number:03}.png")
    plugins = load_plugins(Selection(only=("cache", "storage_s3")))
    catalog = catalog_of(plugins)
    entries = [
        {"id": "pets", "instance_data_dir": str(tmp_path / "pets"), "caption_strategy": "instanceprompt"},
        {"id": "latents", "dataset_type": "image_embeds", "type": "aws", **options(store)},
    ]
    entries[0] |= {"instance_prompt": "a pet", "image_embeds": "latents"}
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16), catalog=catalog)
    assert not problems
    config = resolve(schema_of(plugins), [f"--train_batch_size={BATCH}", "--text_cache_disable"], environment={})
    place = CachePlace(spec=next(spec for spec in specs if spec.id == "latents"))
    shape = BatchShape(train_batch_size=BATCH, ranks=1, accumulation=1)
    requests, seen = [], []
    for passes in (None, BlockOrder(SIZE, 1)):
        rules = DataRules(seed=3, shape=shape, alignment=8, passes=passes)
        data = prepare(build_datasets(specs, Catalog()), rules)
        folders = CacheFolders(texts=place, latents={"pets": place}, catalog=catalog)
        encoder = AheadEncoder(config=config, family=Encoding(), folders=folders)
        alone = GlooCommunicator(world=World(), group=None)
        latents = encoder.encode(data, alone, tmp_path, Phases(), [], []).latents
        storage = latents.stores[0]._storage
        before = sum(one.requests for one in storage.traffic().values())
        with Loader(data, world=World(), micro_batch=BATCH, latents=latents) as loader:
            micros = [batch.micro[0] for batch in islice(loader, IMAGES // BATCH)]
        requests.append(sum(one.requests for one in storage.traffic().values()) - before)
        seen.append({key: rows[0, 0, 0].item() for one in micros for key, rows in zip(one.keys, one.latents, strict=True)})
    assert seen[0] == seen[1]
    assert len(seen[0]) == IMAGES
    assert len(set(seen[0].values())) == IMAGES // 2
    assert requests[1] <= 1.5 * IMAGES / SIZE < 0.3 * requests[0]
