"""Latents and encoded texts as a run reads them: under which key each is kept, and in which store.

A key covers all that decides what an entry holds beside the encoder, whose identity names the store: of an image its file, as
it is now, and how it is cut; of a text the text.

Shapes: B texts of a batch; latents (C, h, w).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from smalti.data.buckets import Bucket
from smalti.data.cache.tensor_store import Entry, TensorStore
from smalti.data.images import Bytes, crop, read_image
from smalti.data.prepared import PreparedData
from smalti.diffusion import Conditioning
from smalti.system import derive_seed, uniform

CropOffset = tuple[int, int]
"""Left and top of a cut, in pixels of the scaled image."""

_RECIPE = 2
"""To be raised when the same file and crop become other pixels than before."""
_TEXT_RECIPE = 1


class CachedLatents:
    """The latents of all images of a run, by sample; `stores` are those of its datasets, in their order.

    A random cut is drawn once for each image, from the name of the image alone: so runs of any seed share the entry.
    """

    def __init__(self, data: PreparedData, stores: Sequence[TensorStore]) -> None:
        self._data = data
        self.stores = tuple(stores)
        self.broken: frozenset[int] = frozenset()
        """Samples that have no latents because their images cannot be read."""

    def store(self, sample: int) -> TensorStore:
        return self.stores[self._data.locate(sample)[0]]

    def key(self, sample: int, bucket: Bucket) -> str:
        position, row = self._data.locate(sample)
        dataset, crop_settings = self._data.datasets[position], self._data.crop_settings[position]
        name = dataset.index.key(row)
        cut = (
            [crop_settings.crop_style, dataset.spec.id if crop_settings.crop_style == "random" else ""]
            if crop_settings.crop
            else []
        )
        return _key(_RECIPE, dataset.storage.location, name, dataset.index.etag(row), bucket.width, bucket.height, *cut)

    def image(self, sample: int, bucket: Bucket) -> tuple[Bytes, CropOffset]:
        """The image to encode, cut to its bucket, and where it was cut. Raises BadSampleError."""
        return fixed_crop(self._data, sample, bucket)

    @staticmethod
    def entry(latents: Tensor, offset: CropOffset) -> Entry:
        return {"latents": latents, "corner": torch.tensor(offset)}

    def get(self, sample: int, bucket: Bucket) -> tuple[Tensor, CropOffset]:
        """The latents of an image that is not broken, and where it was cut."""
        entry = self.store(sample).get(self.key(sample, bucket))
        left, top = entry["corner"].tolist()
        return entry["latents"], (left, top)


class CachedTexts:
    """The conditioning of all texts of a run: captions, validation prompts and the empty prompt."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store

    @staticmethod
    def key(text: str) -> str:
        return _key(_TEXT_RECIPE, text)

    def rows(self, texts: Sequence[str]) -> Conditioning:
        """Conditioning with a leading dimension of len(texts), on the CPU, as `encode_captions` would give it."""
        entries = [self.store.get(self.key(text)) for text in texts]
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def fixed_crop(data: PreparedData, sample: int, bucket: Bucket) -> tuple[Bytes, CropOffset]:
    """An image cut to its bucket, and where it was cut: if at random, then always the same. Raises BadSampleError."""
    position, row = data.locate(sample)
    dataset, crop_settings = data.datasets[position], data.crop_settings[position]
    name = dataset.index.key(row)
    image = read_image(dataset.storage, name, crop_settings, bucket)
    fractions = uniform(derive_seed("across", dataset.spec.id, name)), uniform(derive_seed("down", dataset.spec.id, name))
    offset = crop_settings.offset((image.shape[2], image.shape[1]), bucket, fractions)
    return crop(image, bucket, offset), offset


def _key(*words: object) -> str:
    return blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()
