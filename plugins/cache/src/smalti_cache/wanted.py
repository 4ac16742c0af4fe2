"""What a run needs that is not cached yet, found in chunks of rows: memory does not depend on the number of images.

Images are shared out in order of rows, so that each rank reads its part of a table or an archive in order. Texts are shared out
by their keys, since many images may have the same one: each rank looks at all of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smalti import World
from smalti.data import Bucket, DatasetIndex, PreparedData, Threads
from smalti_cache.earlier import EarlierParts, earlier_latents_key, earlier_text_key
from smalti_cache.embedding_cache import IMAGE_COLUMNS, CachedLatents, CachedTexts
from smalti_cache.keys import Key, Keys
from smalti_cache.profiles import is_srgb
from smalti_cache.store import PackStore
from smalti_cache.text_keys import TextKeys

CHUNK = 1 << 16
"""Rows that are looked at together."""
_RANGE = 1 << 19
"""Texts that are looked for in the store together."""
_ORDINALS = 1 << 16
_READING_THREADS = 16


def bucket_numbers(data: PreparedData, dataset: int, start: int, stop: int) -> NDArray[np.int16]:
    """The buckets of the rows from `start` to `stop` of a dataset, by their places in `order.buckets`.

    -1 is for a row that is not trained on.
    """
    stop = min(stop, len(data.datasets[dataset].index))
    numbers = np.full(max(0, stop - start), -1, dtype=np.int16)
    for number, content in enumerate(data.order.buckets):
        for part in content.parts:
            if part.dataset == dataset and len(numbers):
                # Numbers of the rows' own type: otherwise all rows would be converted first.
                first, last = np.searchsorted(part.rows, np.array([start, stop - 1], dtype=np.uint32))
                rows = part.rows[first : last + 1]
                numbers[rows[rows < stop].astype(np.int64) - start] = number
    return numbers


@dataclass(frozen=True)
class Part:
    """One of `count` parts of the work, which are about equal; `number` counts from 0."""

    number: int = 0
    count: int = 1

    def of(self, total: int) -> tuple[int, int]:
        """Returns where this part of `total` things begins and ends."""
        return total * self.number // self.count, total * (self.number + 1) // self.count

    def divided(self, world: World) -> Part:
        """Returns the part of this part that a rank has."""
        return Part(self.number * world.size + world.rank, self.count * world.size)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image to encode, as it is or mirrored, and the key for its latents."""

    sample: int
    bucket: Bucket
    key: Key
    flipped: bool


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a dataset."""

    dataset: int
    start: int
    stop: int


class WantedImages:
    """The images of a run whose latents are missing.

    Args:
        latents: with their stores.
        part: which rows of each dataset are meant.
        say: called with a line for the user before work that takes long; None says nothing.
    """

    def __init__(self, latents: CachedLatents, part: Part, say: Callable[[str], None] | None = None) -> None:
        self._latents = latents
        self._data = latents.data
        self._say = say
        self._earlier: dict[PackStore, EarlierParts] = {}
        self._srgb: dict[int, bool] = {}
        """Rows of the chunk that `count` looks at, as far as their files were opened."""
        self.chunks = [
            Chunk(number, start, min(start + CHUNK, last))
            for number, dataset in enumerate(self._data.datasets)
            for first, last in [part.of(len(dataset.index))]
            for start in range(first, last, CHUNK)
        ]

    def share(self, world: World) -> range:
        """The chunks, by number, that a rank looks at."""
        return range(*Part().divided(world).of(len(self.chunks)))

    def count(self, number: int) -> tuple[int, int]:
        """Returns how many latents the rows of a chunk need, and how many of them are missing.

        Entries of earlier versions that are found on the way are added to their store, under their present keys.
        """
        wanted, missing = 0, 0
        self._srgb = {}
        chunk = self.chunks[number]
        store = self._latents.stores[chunk.dataset]
        for rows, variants in self._missing(chunk):
            wanted += rows * len(variants)
            missing += sum(len(found) for _, _, found, _ in variants)
        adopted = self._adopt_keys(store, chunk) if missing and len(store) else set()
        missing -= len(adopted)
        if missing and store.earlier_parts:
            missing -= self._adopt(store, chunk, adopted)
        return wanted, missing

    def images(self, number: int) -> Iterator[Image]:
        """Yields the missing images of a chunk in order of rows."""
        chunk = self.chunks[number]
        offset = self._data.offsets[chunk.dataset]
        for _, variants in self._missing(chunk):
            rows = np.concatenate([found for _, _, found, _ in variants])
            which = np.repeat(np.arange(len(variants)), [len(found) for _, _, found, _ in variants])
            keys = Keys.joined([keys for *_, keys in variants])
            buckets = np.concatenate([numbers[found - first] for (first, numbers), _, found, _ in variants])
            for place in np.lexsort((which, rows)).tolist():
                yield Image(
                    sample=offset + int(rows[place]),
                    bucket=self._data.order.buckets[buckets[place]].bucket,
                    key=keys.key(place),
                    flipped=variants[which[place]][1],
                )

    def _missing(self, chunk: Chunk) -> Iterator[tuple[int, list[_Variant]]]:
        """Yields how many rows of a part of a chunk are trained on, and for each variant the rows without latents."""
        dataset, store = self._data.datasets[chunk.dataset], self._latents.stores[chunk.dataset]
        for start, columns, numbers, sizes in self._rows(chunk):
            variants: list[_Variant] = []
            for flipped in dataset.flips:
                keys = self._latents.keys(chunk.dataset, columns, numbers, sizes, flipped=flipped)
                found = np.flatnonzero((numbers >= 0) & ~store.has(keys))
                variants.append(((start, numbers), flipped, found + start, keys[found]))
            yield int(np.count_nonzero(numbers >= 0)), variants

    def _rows(self, chunk: Chunk) -> Iterator[tuple[int, dict[str, pa.Array], NDArray[np.int16], NDArray[np.int64]]]:
        """Yields parts of a chunk: the first row, columns, and of all rows the numbers of buckets and the sizes."""
        index = self._data.datasets[chunk.dataset].index
        for start, columns in slices(index, (*IMAGE_COLUMNS, "width", "height"), chunk.start, chunk.stop):
            sizes = np.column_stack([columns[name].to_numpy().astype(np.int64) for name in ("width", "height")])
            yield start, columns, bucket_numbers(self._data, chunk.dataset, start, start + len(sizes)), sizes

    def _adopt_keys(self, store: PackStore, chunk: Chunk) -> set[Key]:
        """Add references to entries that are there under earlier keys; returns their present keys."""
        before, now = [], []
        for start, columns, numbers, sizes in self._rows(chunk):
            for flipped in self._data.datasets[chunk.dataset].flips:
                given = chunk.dataset, columns, numbers, sizes
                keys = self._latents.keys(*given, flipped=flipped)
                wanted = np.flatnonzero((numbers >= 0) & ~store.has(keys))
                for earlier, only_srgb in self._latents.earlier_keys(*given, flipped=flipped):
                    there = store.has(earlier[wanted])
                    if only_srgb:
                        there[there] = self._are_srgb(chunk.dataset, start + wanted[there])
                    before.append(earlier[wanted[there]])
                    now.append(keys[wanted[there]])
                    wanted = wanted[~there]
        keys = Keys.joined(now)
        adopted = keys[store.adopt(Keys.joined(before), keys)]
        return {adopted.key(place) for place in range(len(adopted))}

    def _adopt(self, store: PackStore, chunk: Chunk, adopted: set[Key]) -> int:
        """Add references to entries in parts of earlier versions, except for those adopted; returns how many."""
        if store not in self._earlier:
            self._earlier[store] = EarlierParts(store.earlier_parts, store.read)
        earlier, found = self._earlier[store], []
        for image in self.images(self.chunks.index(chunk)):
            row = image.sample - self._data.offsets[chunk.dataset]
            key = earlier_latents_key(self._data, chunk.dataset, row, image.bucket, flipped=image.flipped)
            if key in earlier and image.key not in adopted:
                found.append((row, image.key, key))
        right = self._are_srgb(chunk.dataset, np.array([row for row, _, _ in found], dtype=np.intp))
        pairs = [(now, before) for (_, now, before), keep in zip(found, right.tolist(), strict=True) if keep]
        if pairs:
            store.put_references(earlier.references(pairs))
        return len(pairs)

    def _are_srgb(self, dataset: int, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these images have no colour profile that matters. Reads the beginning of their files, once."""
        unknown = sorted({*rows.tolist()} - self._srgb.keys())
        if unknown:
            if self._say:
                self._say("looking for colour profiles in the images of a cache whose version ignored them; this is done once")
                self._say = None
            with Threads(_READING_THREADS, "smalti-profiles") as pool:
                found = pool.map(partial(is_srgb, self._data.datasets[dataset]), unknown)
                self._srgb.update(zip(unknown, found, strict=True))
        return np.array([self._srgb[row] for row in rows.tolist()], dtype=np.bool_)


_Variant = tuple[tuple[int, NDArray[np.int16]], bool, NDArray[np.int64], Keys]


@dataclass(frozen=True, eq=False)
class _Texts:
    """Texts that are missing, each once: their keys and sources, which are numbers that `WantedTexts.text` understands."""

    wanted: int
    keys: Keys
    sources: NDArray[np.int64]


class WantedTexts:
    """The texts of a run that are not encoded: every text that a visit may pick, and others.

    Args:
        texts: with their store.
        data: the images with captions.
        others: further texts.
        negative: whether `others` are negative prompts.
        part: of the keys.
        ids: of the datasets whose texts are meant; None means all.
    """

    def __init__(
        self,
        texts: CachedTexts,
        data: Sequence[PreparedData],
        others: Sequence[str],
        part: Part,
        *,
        negative: bool = False,
        ids: Collection[str] | None = None,
    ) -> None:
        self._texts = texts
        self._negative = negative
        self._others = list(others)
        self._datasets = [
            (one, number)
            for one in data
            for number, dataset in enumerate(one.datasets)
            if ids is None or dataset.spec.id in ids
        ]
        self._starts = np.cumsum([0, *(len(one.datasets[number].index) for one, number in self._datasets)]).tolist()
        number, count = part.number << 64, part.count
        ranges = -(-self._starts[-1] // (_RANGE * count)) or 1
        self._found = TextKeys(number // count, (number + (1 << 64)) // count, ranges)
        self._earlier: EarlierParts | None = None

    def close(self) -> None:
        """Remove the temporary file in which many keys are."""
        self._found.close()

    def count(self) -> tuple[int, int]:
        """Returns how many different texts are in this part, and how many of them are missing. Called once.

        Entries of earlier versions that are found on the way are added to the store, under their present keys.
        """
        for keys, sources in self._all():
            self._found.add(keys, sources)
        wanted = missing = 0
        for number in range(len(self._found)):
            found = self._missing(number)
            if len(found.keys) and self._texts.store.earlier_parts:
                found = self._adopt(found)
            wanted, missing = wanted + found.wanted, missing + len(found.keys)
        return wanted, missing

    def missing(self) -> Iterator[tuple[str, Key]]:
        """Yields the missing texts of this part, after `count` and a `refresh` of the store if something was added to it."""
        for number in range(len(self._found)):
            found = self._missing(number)
            for place, source in enumerate(found.sources.tolist()):
                yield self._text(source), found.keys.key(place)

    def _text(self, source: int) -> str:
        if source < 0:
            return self._others[-1 - source]
        row, ordinal = divmod(source, _ORDINALS)
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        data, number = self._datasets[place]
        return data.datasets[number].texts(row - self._starts[place])[ordinal]

    def _missing(self, number: int) -> _Texts:
        """Returns the missing texts of one range of keys."""
        keys, sources = self._found.read(number)
        missing = ~self._texts.store.has(keys)
        return _Texts(len(keys), keys[missing], sources[missing])

    def _all(self) -> Iterator[tuple[Keys, NDArray[np.int64]]]:
        """Yields the keys and sources of all texts of the run, in chunks."""
        others = Keys.of([self._texts.key(text, negative=self._negative) for text in self._others])
        yield others, -1 - np.arange(len(others), dtype=np.int64)
        for place, (data, number) in enumerate(self._datasets):
            dataset = data.datasets[number]
            for start, columns in slices(dataset.index, ("captions",), 0, len(dataset.index)):
                captions = columns["captions"]
                used = bucket_numbers(data, number, start, start + len(captions)) >= 0
                if dataset.caption_policy.keeps_captions:
                    texts, counts = captions.flatten(), np.diff(captions.offsets.to_numpy())
                else:
                    lists = [dataset.texts(start + row) if used[row] else () for row in range(len(used))]
                    texts = pa.array([text for some in lists for text in some], type=pa.string())
                    counts = np.array([len(some) for some in lists], dtype=np.int64)
                rows = np.repeat(np.arange(len(used), dtype=np.int64), counts)
                ordinals = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
                chosen = np.flatnonzero(used[rows])
                source = (self._starts[place] + start + rows) * _ORDINALS + ordinals
                yield self._texts.keys(texts)[chosen], source[chosen]

    def _adopt(self, found: _Texts) -> _Texts:
        """Add references to entries of earlier versions; returns the texts that are still missing."""
        store = self._texts.store
        if self._earlier is None:
            self._earlier = EarlierParts(store.earlier_parts, store.read)
        names = [earlier_text_key(self._text(source), negative=self._negative) for source in found.sources.tolist()]
        there = np.array([name in self._earlier for name in names], dtype=np.bool_)
        if there.any():
            pairs = [(found.keys.key(place), names[place]) for place in np.flatnonzero(there).tolist()]
            store.put_references(self._earlier.references(pairs))
        return _Texts(found.wanted, found.keys[~there], found.sources[~there])


def slices(index: DatasetIndex, columns: Sequence[str], start: int, stop: int) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yields columns of an index from one row to another, at most `CHUNK` rows at a time, each with its first row."""
    for batch in index.batches(*columns):
        if batch.start >= stop:
            return
        first, last = max(start, batch.start), min(stop, batch.start + len(batch))
        for begin in range(first, last, CHUNK):
            part = partial(pa.Array.slice, offset=begin - batch.start, length=min(CHUNK, last - begin))
            yield begin, {name: part(column) for name, column in batch.columns.items()}
