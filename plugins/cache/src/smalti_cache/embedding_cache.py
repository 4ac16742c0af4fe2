"""Cached latents and encoded texts: the key of each entry, and its store.

A key covers everything that determines an entry except the encoder, whose identity is in the name of the store: for an image
its name, the file's etag, the digest of its beginning and the crop; for a text the text. So images are found wherever their
dataset is. Where the scan did not open them, as with sizes from a table, the identity of the storage stands for the digest.
Further kinds of entries (masks, frames) get a first text of their own.

Shapes: B texts of a batch; latents (C, h, w).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from smalti.data import Bucket, Bytes, CropOffset, PreparedData, fixed_crop
from smalti.diffusion import Conditioning
from smalti.system import as_signed, derive_seed
from smalti_cache.block_order import BlockOrder
from smalti_cache.entries import Entry
from smalti_cache.keys import Hasher, Key, Keys, single_key
from smalti_cache.reads.blocks import Block, BlockReads, Entries, Wanted
from smalti_cache.store import PackStore

_RECIPE = "5"
"""Increase it when the same file and crop give other pixels than before. Then `earlier_keys` has to say for which images."""
_UNMANAGED_RECIPE = "4"
"""Of keys under which the colour profiles of images were ignored."""
_LOCATED_RECIPE = "3"
"""Of such keys that contain the location of the dataset."""
IMAGE_COLUMNS = ("key", "etag", "content")
"""The columns of an index that keys depend on."""
_TEXT_RECIPE = "2"
_UNSCALED = (0, 0)


class CachedLatents:
    """The latents of all images of a run, by sample; `stores` are those of its datasets, in their order.

    In an order of blocks, those of a block are read together, and at most `ahead` bytes wait for their visits.

    A random crop is chosen once for each image, from its name alone: so runs with any seed share the entry.
    """

    def __init__(self, data: PreparedData, stores: Sequence[PackStore], *, ahead: int = 4 << 30) -> None:
        self.data = data
        self.stores = tuple(stores)
        order = data.order.passes
        self._block_size = order.size if isinstance(order, BlockOrder) else 0
        self._blocks = BlockReads(self._read_blocks, ahead) if self._block_size else None
        self._bucket_numbers = {content.bucket: number for number, content in enumerate(data.order.buckets)}
        self._origins = [as_signed(derive_seed("origin", dataset.storage.identity)) for dataset in data.datasets]
        """Of each dataset what stands for the contents of images that are not known."""
        self.broken: frozenset[int] = frozenset()
        """Samples without latents, because their images cannot be read."""

    def store(self, sample: int) -> PackStore:
        return self.stores[self.data.locate(sample)[0]]

    def key(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> Key:
        position, row = self.data.locate(sample)
        index = self.data.datasets[position].index
        scaled = self._scaled(position, index.size(row), bucket)
        values = (index.key(row), index.etag(row), bucket.width, bucket.height, *scaled, int(flipped))
        content = index.content(row)
        return single_key(self._constants(position), *values, content, 0 if content else self._origins[position])

    def keys(
        self,
        position: int,
        columns: dict[str, pa.Array],
        numbers: NDArray[np.int16],
        sizes: NDArray[np.int64],
        *,
        flipped: bool,
        recipe: str = _RECIPE,
    ) -> Keys:
        """The keys of consecutive rows of a dataset.

        Args:
            position: of the dataset.
            columns: `IMAGE_COLUMNS` of the index.
            numbers: of the buckets; what the keys of rows with -1 are has no meaning.
            sizes: (rows, 2), width and height.
            flipped: whether the images are mirrored.
            recipe: of these keys.
        """
        content = columns["content"].to_numpy()
        origin = np.where(content == 0, self._origins[position], 0)
        hasher = self._hasher(self._constants(position, recipe), position, columns, numbers, sizes)
        return hasher.numbers(int(flipped)).numbers(content).numbers(origin).keys()

    def earlier_keys(
        self,
        position: int,
        columns: dict[str, pa.Array],
        numbers: NDArray[np.int16],
        sizes: NDArray[np.int64],
        *,
        flipped: bool,
    ) -> Iterator[tuple[Keys, bool]]:
        """Yields other keys that entries of the same rows may have: of scans without digests, and of earlier versions.

        Each with whether the entries are right only for images without a colour profile (`is_srgb`).
        """
        given = position, columns, numbers, sizes
        unopened = columns | {"content": pa.array(np.zeros(len(numbers), dtype=np.int64))}
        if columns["content"].to_numpy().any():
            yield self.keys(position, unopened, numbers, sizes, flipped=flipped), False
            yield self.keys(position, unopened, numbers, sizes, flipped=flipped, recipe=_UNMANAGED_RECIPE), True
        yield self.keys(*given, flipped=flipped, recipe=_UNMANAGED_RECIPE), True
        kind, _, *others = self._constants(position)
        located = kind, _LOCATED_RECIPE, self.data.datasets[position].storage.location, *others
        yield self._hasher(located, *given).numbers(int(flipped)).keys(), True

    def _hasher(
        self,
        constants: Sequence[str],
        position: int,
        columns: dict[str, pa.Array],
        numbers: NDArray[np.int16],
        sizes: NDArray[np.int64],
    ) -> Hasher:
        """Returns a hasher that has everything that present and earlier keys have in common."""
        buckets = [content.bucket for content in self.data.order.buckets]
        frames = np.array([(bucket.width, bucket.height) for bucket in buckets], dtype=np.int64)[numbers]
        hasher = Hasher(len(numbers), *constants).texts(columns["key"]).texts(columns["etag"])
        hasher.numbers(frames[:, 0]).numbers(frames[:, 1])
        scaled = np.zeros((len(numbers), 2), dtype=np.int64)
        if self.data.crop_settings[position].maximum_image_size:
            distinct, which = np.unique(np.column_stack([sizes, numbers]), axis=0, return_inverse=True)
            choices = [
                self._scaled(position, (width, height), buckets[number]) if number >= 0 else _UNSCALED
                for width, height, number in distinct.tolist()
            ]
            scaled = np.array(choices, dtype=np.int64)[which.reshape(-1)]
        return hasher.numbers(scaled[:, 0]).numbers(scaled[:, 1])

    def image(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Bytes, CropOffset]:
        """Returns the image to encode, cropped to its bucket, and the offset of the crop. Raises BadSampleError."""
        return fixed_crop(self.data, sample, bucket, flipped=flipped)

    @staticmethod
    def entry(latents: Tensor, offset: CropOffset) -> Entry:
        return {"latents": latents, "corner": torch.tensor(offset)}

    def get(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Tensor, CropOffset]:
        """Returns the latents of an image that is not broken, and the offset of its crop."""
        return _latents(self._read([(sample, flipped)], bucket)[sample, flipped])

    def get_many(self, images: Sequence[Wanted], bucket: Bucket) -> list[tuple[Tensor, CropOffset]]:
        """Like `get` for several images of a bucket, each with whether it is flipped; with few reads."""
        found: dict[Wanted, Entry] = {}
        if self._blocks is not None:
            ahead = self._blocks.take([(self._block(sample, bucket), (sample, flipped)) for sample, flipped in images])
            found = {image: entry for image, entry in zip(images, ahead, strict=True) if entry is not None}
        found |= self._read([image for image in images if image not in found], bucket)
        return [_latents(found[image]) for image in images]

    def _read(self, images: Iterable[Wanted], bucket: Bucket) -> dict[Wanted, Entry]:
        """Returns the entries of images of a bucket."""
        found: dict[Wanted, Entry] = {}
        by_store: dict[PackStore, list[Wanted]] = {}
        for image in dict.fromkeys(images):
            by_store.setdefault(self.store(image[0]), []).append(image)
        for store, some in by_store.items():
            keys = [self.key(sample, bucket, flipped=flipped) for sample, flipped in some]
            found.update(zip(some, store.get_many(keys), strict=True))
        return found

    def _block(self, sample: int, bucket: Bucket) -> Block:
        """Returns the block of a sample that is trained in a bucket."""
        dataset, row = self.data.locate(sample)
        number = self._bucket_numbers[bucket]
        for place, part in enumerate(self.data.order.buckets[number].parts):
            if part.dataset == dataset:
                at = int(np.searchsorted(part.rows, np.uint32(row)))
                if at < len(part.rows) and part.rows[at] == row:
                    return Block(number, place, at // self._block_size)
        raise AssertionError(f"sample {sample} is not in bucket {bucket}")

    def _read_blocks(self, blocks: Sequence[Block]) -> list[Entries]:
        """Returns the entries of blocks, without those of broken images."""
        found: list[Entries] = [{} for _ in blocks]
        by_bucket: dict[int, list[int]] = {}
        for place, block in enumerate(blocks):
            by_bucket.setdefault(block.bucket, []).append(place)
        for number, places in by_bucket.items():
            content, wanted = self.data.order.buckets[number], dict[Wanted, int]()
            for place in places:
                part, start = content.parts[blocks[place].part], blocks[place].number * self._block_size
                samples = part.rows[start : start + self._block_size].astype(np.int64) + part.offset
                flips = self.data.datasets[part.dataset].flips
                wanted |= {(each, flip): place for each in samples.tolist() if each not in self.broken for flip in flips}
            for image, entry in self._read(wanted, content.bucket).items():
                found[wanted[image]][image] = entry
        return found

    def _constants(self, position: int, recipe: str = _RECIPE) -> tuple[str, ...]:
        """What the keys of all images of a dataset depend on."""
        dataset, settings = self.data.datasets[position], self.data.crop_settings[position]
        style = settings.crop_style if settings.crop else ""
        return "latents", recipe, style, dataset.spec.id if style == "random" else ""

    def _scaled(self, position: int, size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
        """Returns the size to which an image is scaled, if `maximum_image_size` makes it another one than usual."""
        settings = self.data.crop_settings[position]
        if not settings.maximum_image_size:
            return _UNSCALED
        scaled = settings.resized(*size, bucket)
        return _UNSCALED if scaled == replace(settings, maximum_image_size=0).resized(*size, bucket) else scaled


def _latents(entry: Entry) -> tuple[Tensor, CropOffset]:
    left, top = entry["corner"].tolist()
    return entry["latents"], (left, top)


class CachedTexts:
    """The conditioning of all texts of a run: captions, validation prompts, negative prompts and the empty prompt.

    `store` has prompts, and the captions of datasets without a store of their own; `others` are those of the other datasets.
    """

    def __init__(self, store: PackStore, others: Sequence[PackStore] = ()) -> None:
        self.store = store
        self.others = tuple(others)

    @staticmethod
    def key(text: str, *, negative: bool = False) -> Key:
        """The key of a caption, or of a negative prompt."""
        return single_key(("text", _TEXT_RECIPE), text, int(negative))

    @staticmethod
    def keys(texts: pa.Array) -> Keys:
        """The keys of captions."""
        return Hasher(len(texts), "text", _TEXT_RECIPE).texts(texts).numbers(0).keys()

    def rows(self, texts: Sequence[str | None], *, negative: bool = False) -> Conditioning:
        """Conditioning with a leading dimension of len(texts), on the CPU, as `encode_captions` returns it.

        With `negative`, as `encode_negative_prompts` does; None is no negative prompt, which is the empty caption.
        """
        entries = self._entries([self.key(text or "", negative=negative and text is not None) for text in texts])
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}

    def _entries(self, keys: Sequence[Key]) -> list[Entry]:
        """Returns the entries of keys, each from the first store that has it."""
        found: dict[Key, Entry] = {}
        for store in self.others:
            missing = [key for key in dict.fromkeys(keys) if key not in found]
            some = [key for key, there in zip(missing, store.has(Keys.of(missing)).tolist(), strict=True) if there]
            found.update(zip(some, store.get_many(some), strict=True))
        rest = [key for key in dict.fromkeys(keys) if key not in found]
        found.update(zip(rest, self.store.get_many(rest), strict=True))
        return [found[key] for key in keys]
