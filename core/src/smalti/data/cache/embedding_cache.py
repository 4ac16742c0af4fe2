"""Cached latents and encoded texts: the key of each entry, and its store.

A key covers everything that determines an entry except the encoder, whose identity is in the name of the store: for an image
the file's etag and the crop; for a text the text.

Shapes: B texts of a batch; latents (C, h, w).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from smalti.data.buckets import Bucket
from smalti.data.cache.tensor_store import Entry, TensorStore
from smalti.data.images import Bytes, crop, mirrored, read_image
from smalti.data.prepared import PreparedData
from smalti.diffusion import Conditioning
from smalti.system import derive_seed, uniform

CropOffset = tuple[int, int]
"""Left and top of a crop, in pixels of the scaled image."""

_RECIPE = 2
"""Increase it when the same file and crop give other pixels than before."""
_TEXT_RECIPE = 1


class CachedLatents:
    """The latents of all images of a run, by sample; `stores` are those of its datasets, in their order.

    A random crop is chosen once for each image, from its name alone: so runs with any seed share the entry.
    """

    def __init__(self, data: PreparedData, stores: Sequence[TensorStore]) -> None:
        self._data = data
        self.stores = tuple(stores)
        self.broken: frozenset[int] = frozenset()
        """Samples without latents, because their images cannot be read."""

    def store(self, sample: int) -> TensorStore:
        return self.stores[self._data.locate(sample)[0]]

    def key(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> str:
        position, row = self._data.locate(sample)
        dataset, crop_settings = self._data.datasets[position], self._data.crop_settings[position]
        name = dataset.index.key(row)
        cropped = (
            [crop_settings.crop_style, dataset.spec.id if crop_settings.crop_style == "random" else ""]
            if crop_settings.crop
            else []
        )
        size = dataset.index.size(row)
        scaled = crop_settings.resized(*size, bucket)
        if crop_settings.maximum_size and scaled != replace(crop_settings, maximum_size=0).resized(*size, bucket):
            cropped += map(str, scaled)
        if flipped:
            cropped.append("flipped")
        return _key(_RECIPE, dataset.storage.location, name, dataset.index.etag(row), bucket.width, bucket.height, *cropped)

    def image(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Bytes, CropOffset]:
        """Returns the image to encode, cropped to its bucket, and the offset of the crop. Raises BadSampleError."""
        return fixed_crop(self._data, sample, bucket, flipped=flipped)

    @staticmethod
    def entry(latents: Tensor, offset: CropOffset) -> Entry:
        return {"latents": latents, "corner": torch.tensor(offset)}

    def get(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Tensor, CropOffset]:
        """Returns the latents of an image that is not broken, and the offset of its crop."""
        entry = self.store(sample).get(self.key(sample, bucket, flipped=flipped))
        left, top = entry["corner"].tolist()
        return entry["latents"], (left, top)


class CachedTexts:
    """The conditioning of all texts of a run: captions, validation prompts, negative prompts and the empty prompt."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store

    @staticmethod
    def key(text: str, *, negative: bool = False) -> str:
        """The key of a caption, or of a negative prompt. The empty prompt is the same as both."""
        return _key(_TEXT_RECIPE, text, *(["negative"] if negative and text else []))

    def rows(self, texts: Sequence[str], *, negative: bool = False) -> Conditioning:
        """Conditioning with a leading dimension of len(texts), on the CPU, as `encode_captions` returns it.

        With `negative`, as `encode_negative_prompts` does.
        """
        entries = [self.store.get(self.key(text, negative=negative)) for text in texts]
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def fixed_crop(data: PreparedData, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Bytes, CropOffset]:
    """Returns an image cropped to its bucket, and the offset; a random crop is always the same. Raises BadSampleError.

    With `flipped` it is the same part of the image, mirrored.
    """
    position, row = data.locate(sample)
    dataset, crop_settings = data.datasets[position], data.crop_settings[position]
    name = dataset.index.key(row)
    image = read_image(lambda: dataset.read(row), crop_settings, bucket)
    fractions = uniform(derive_seed("across", dataset.spec.id, name)), uniform(derive_seed("down", dataset.spec.id, name))
    offset = crop_settings.offset((image.shape[2], image.shape[1]), bucket, fractions)
    return mirrored(image, bucket, offset) if flipped else (crop(image, bucket, offset), offset)


def _key(*parts: object) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
