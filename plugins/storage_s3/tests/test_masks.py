"""Masks in a bucket: of images in another place, and beside images in the same bucket."""

import io
from itertools import islice

import pytest
from PIL import Image

from smalti.data import Loader, build_datasets, catalog_of, parse_datasets, prepare
from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults
from smalti.data.prepared import DataRules
from smalti.plugins import Selection, load_plugins
from smalti.types import World

CATALOG = catalog_of(load_plugins(Selection(only=("storage_s3", "objectives"))))


def png(mode, colour):
    file = io.BytesIO()
    Image.new(mode, (16, 16), colour).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("beside", [False, True])
def test_masks_are_read_from_the_bucket(store, options, tmp_path, beside):
    bucket = {"type": "aws", **options(store)}
    masks = {"id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask", **bucket}
    pets = {"id": "pets", "caption_strategy": "filename"}
    elsewhere = {"instance_data_dir": str(tmp_path), "conditioning_data": "masks"}
    pets |= {**bucket, "mask_suffix": ".mask.png"} if beside else elsewhere
    specs, problems = parse_datasets(
        [pets] if beside else [pets, masks], where="", defaults=DataDefaults(resolution=16), catalog=CATALOG
    )
    storage = CATALOG.open_storage(next(spec for spec in specs if spec.type == "aws"))
    for number in range(4):
        if beside:
            storage.write(f"{number}.png", png("RGB", (1, 2, 3)))
        else:
            (tmp_path / f"{number}.png").write_bytes(png("RGB", (1, 2, 3)))
        if number < 3:
            storage.write(f"{number}.mask.png" if beside else f"{number}.png", png("L", 50 * number))

    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    data = prepare(build_datasets(specs, CATALOG), DataRules(seed=3, shape=shape, alignment=8))
    with Loader(data, world=World(), micro_batch=4) as loader:
        (micro,) = (batch.micro[0] for batch in islice(loader, 1))
    found = {key: mask.unique().tolist() for key, mask in zip(micro.keys, micro.columns["mask"], strict=True)}

    assert not problems
    assert found == {"pets/0.png": [0], "pets/1.png": [50], "pets/2.png": [100], "pets/3.png": [255]}
    assert data.notices == (f"dataset 'pets': 1 of 4 images have no mask in {storage.location}; they are trained as a whole",)
