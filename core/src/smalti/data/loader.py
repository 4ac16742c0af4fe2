"""Loads the batches of one rank, from a position on and without end, in background threads.

Worker threads read, decode and scale; decoding releases the interpreter lock, so they run beside the training step. At most
`prefetch` batches are in progress or ready: the next one is started when one is taken. With cached latents or texts
(`smalti.data.encoded`), threads read those, and open no image.

Shapes: B images of a micro-batch, H, W pixels, 3 colours, latents (B, C, h, w).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smalti.data.buckets import Bucket
from smalti.data.dataset import Sample
from smalti.data.datasets.columns import Column, Framing
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.encoded import CachedLatents, CachedTexts, CropOffset
from smalti.data.images import Bytes, crop, mirrored, normalised, read_image
from smalti.data.order import GlobalBatch, Numbers
from smalti.data.prepared import PreparedData
from smalti.data.scan.quarantine import BadSampleError, ErrorBudget, Quarantined
from smalti.diffusion import Conditioning
from smalti.errors import UserError
from smalti.models import SizeConditioning
from smalti.parallel import pins_memory, use_device
from smalti.system import derive_seed, uniform, usable_cores
from smalti.types import World

_MAX_WORKERS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondCaptions:
    """Other captions of the images of a micro-batch, and their conditioning; None if texts are encoded in every step."""

    captions: tuple[str, ...]
    conditioning: Conditioning | None


def pass_parts(name: str) -> dict[str, str]:
    """What is other in a forward pass "MODEL|caption=NAME|latents=COLUMN" than in "MODEL": names by "caption" and "latents"."""
    return dict(part.split("=", 1) for part in name.split("|")[1:])


class PlannedPasses(Protocol):
    """Which forward passes a step makes. A function of the order of samples, so that ranks need not communicate."""

    def needs(self, position: int, datasets: Collection[DatasetSpec]) -> frozenset[str]:
        """The passes beside "policy" for images of these datasets in the global batch at a position."""
        ...

    def second_caption(self, name: str, caption: str, dataset: DatasetSpec, number: int) -> str:
        """The caption of this name of a visit, in place of the `caption` that it has; `number` is that of the visit."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The input of one forward pass of this rank; tensors are on its device.

    The images are `pixels` (B, 3, H, W), fp32 in [-1, 1], or else cached `latents`
    (`smalti.models.latents_of` makes the model's latents of either). `conditioning` is
    that of the captions, None if they were not. `numbers` are unique over the run and belong to the visit; `keys` are
    "DATASET/KEY", `datasets` the entries of these datasets; `size_conditioning` says what the images show of their originals.
    `needs`, the same on all ranks, names the passes that the terms of the loss need beside "policy" (`smalti.training.Term`),
    and `second_captions` has the captions of those with a caption of their own.

    `columns` are what plugins read for each image beside it and its captions (`ColumnEntry`), by name, with B as the first
    dimension. A name is absent if no dataset of the run has the column; images of other datasets have its neutral value.
    """

    bucket: Bucket
    pixels: Tensor | None
    latents: Tensor | None
    conditioning: Conditioning | None
    captions: tuple[str, ...]
    numbers: tuple[int, ...]
    keys: tuple[str, ...]
    size_conditioning: tuple[SizeConditioning, ...]
    datasets: tuple[DatasetSpec, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    second_captions: Mapping[str, SecondCaptions] = field(default_factory=dict)
    base: dict[tuple[str, str], Tensor] = field(default_factory=dict, init=False, repr=False)
    """What the model predicts without its adapter, by pass and column of latents. The loss keeps it here, for later turns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One optimizer step of this rank. The position to resume from after it is `position` + 1."""

    position: int
    epoch: int
    bucket: Bucket
    micro: tuple[MicroBatch, ...]


class Loader(Iterator[Batch]):
    """An endless iterator over batches. Close it, or use it in a `with` block.

    An image that cannot be read is recorded in `errors` and replaced by the next readable one in the stream of its bucket.
    Which one depends on the sample's place alone, so ranks need not communicate. `next` raises errors of the storage itself,
    and bugs, with the traceback of their thread.

    Args:
        data: from `prepare`; the same on every rank.
        world: this rank's place; ranks of one context-parallel group get the same samples.
        micro_batch: images per rank and forward pass.
        accumulation: forward passes per optimizer step.
        errors: counts broken images; a new one by default.
        position: the number of global batches before the first.
        prefetch: batches kept ready.
        workers: threads; chosen by the number of cores if 0.
        cache_bytes: memory for scaled images. It is filled once and never evicted: in a shuffled order no policy has more hits.
        latents: cached latents of all images, if there are any.
        texts: cached conditioning of all captions, if there is any.
        host_conditioning: names of what of it stays in host memory.
        latent_shape: (..., h, w) of the latents of an image of this width and height in pixels; by default the pixels'.
        passes: what the terms of the loss need; None if there are none.
    """

    def __init__(
        self,
        data: PreparedData,
        *,
        world: World,
        micro_batch: int,
        accumulation: int = 1,
        errors: ErrorBudget | None = None,
        position: int = 0,
        prefetch: int = 4,
        workers: int = 0,
        cache_bytes: int = 512 << 20,
        latents: CachedLatents | None = None,
        texts: CachedTexts | None = None,
        host_conditioning: Collection[str] = (),
        latent_shape: Callable[[int, int], Sequence[int]] = lambda width, height: (height, width),
        passes: PlannedPasses | None = None,
    ) -> None:
        if micro_batch * world.data_size * accumulation != data.order.effective_batch:
            raise ValueError(
                f"{micro_batch} x {world.data_size} x {accumulation} is not the effective batch of {data.order.effective_batch}"
            )
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.errors = errors or data.error_budget()
        self._reader = _Reader(data, self.errors, cache_bytes, latents, latent_shape, texts_cached=texts is not None)
        self._passes = self._reader.passes = passes
        self._texts = texts
        self._host_conditioning = host_conditioning
        self._rows: dict[str, Tensor] = {}
        self._order = data.order
        self._world = world
        self._micro_batch = micro_batch
        self._accumulation = accumulation
        kind = torch.device(world.device).type
        self._on_host = kind == "cpu"
        self._pins = pins_memory(kind)
        self._next = position
        self.waited = 0.0
        """Seconds spent waiting for the last batch; near 0 as long as the threads keep up."""
        self._stopping = threading.Event()
        workers = workers or min(_MAX_WORKERS, prefetch, max(1, usable_cores() // world.local_size))
        self._pool = ThreadPoolExecutor(workers, "smalti-loader", initializer=use_device, initargs=(world.device,))
        self._ready: deque[Future[Batch]] = deque()
        for _ in range(prefetch):
            self._submit_next()

    @property
    def budget_exhausted(self) -> str | None:
        """Why the run should stop, or None; known as soon as a batch is loaded, so before that batch is taken."""
        return f"{self.errors.exhausted}; {self.errors.fix}" if self.errors.exhausted else None

    def __next__(self) -> Batch:
        if self._stopping.is_set():
            raise RuntimeError("the loader is closed")
        begin = time.perf_counter()
        batch = self._ready.popleft().result()
        self.waited = time.perf_counter() - begin
        self._submit_next()
        # Bytes are copied, a quarter of fp32. On the current stream, so that no synchronization is needed.
        return batch if self._on_host else replace(batch, micro=tuple(self._moved(one) for one in batch.micro))

    def close(self) -> None:
        """Stop the threads and wait until they have ended, at most as long as one image takes. May be called again."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _submit_next(self) -> None:
        self._ready.append(self._pool.submit(self._assemble, self._next))
        self._next += 1

    def _assemble(self, position: int) -> Batch:
        """In a worker thread: load this rank's part of a global batch, as fp32, or for an accelerator as pinned bytes."""
        global_batch = self._order.batch(position)
        micro = tuple(self._micro(global_batch, index) for index in range(self._accumulation))
        return Batch(position=position, epoch=global_batch.epoch, bucket=global_batch.bucket, micro=micro)

    def _micro(self, global_batch: GlobalBatch, index: int) -> MicroBatch:
        size = self._micro_batch
        start, stop = (place * self._world.data_size * size for place in (index, index + 1))  # of all ranks
        first = start + self._world.data_rank * size
        visits = []
        encoded = self._reader.encoded(global_batch, range(first, first + size)) if not self._stopping.is_set() else {}
        for slot in range(first, first + size):
            if self._stopping.is_set():
                break
            visits.append(self._reader.visit(global_batch, slot, encoded))
        captions, numbers = tuple(visit.caption for visit in visits), tuple(global_batch.numbers[first : first + size])
        latents = self._latents(visits)
        needs = self._reader.needs(global_batch, global_batch.samples[start:stop])
        return MicroBatch(
            bucket=global_batch.bucket,
            pixels=self._pixels(visits, global_batch.bucket) if latents is None else None,
            latents=latents,
            conditioning=self._conditioning(captions),
            captions=captions,
            numbers=numbers,
            keys=tuple(visit.key for visit in visits),
            size_conditioning=tuple(visit.size for visit in visits),
            datasets=tuple(visit.dataset for visit in visits),
            needs=needs,
            second_captions=dict(self._second_captions(needs, visits, numbers)),
            columns={
                name: self._pinned(torch.stack([visit.columns[name] for visit in visits]))
                for name in (visits[0].columns if visits else ())
            },
        )

    def _second_captions(
        self, needs: frozenset[str], visits: Sequence[_Visit], numbers: Sequence[int]
    ) -> Iterator[tuple[str, SecondCaptions]]:
        for name in sorted({chosen for each in needs if (chosen := pass_parts(each).get("caption"))}):
            assert self._passes is not None, "it has named these passes"
            choose = partial(self._passes.second_caption, name)
            captions = tuple(
                choose(visit.caption, visit.dataset, number) for visit, number in zip(visits, numbers, strict=False)
            )
            yield name, SecondCaptions(captions=captions, conditioning=self._conditioning(captions))

    def _pixels(self, visits: Sequence[_Visit], bucket: Bucket) -> Tensor:
        shape = (self._micro_batch, 3, bucket.height, bucket.width)
        images = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pins)
        view: Bytes = images.numpy()
        for place, visit in enumerate(visits):
            view[place] = visit.content
        return torch.from_numpy(_normalised(view)) if self._on_host else images

    def _latents(self, visits: Sequence[_Visit]) -> Tensor | None:
        found = [visit.content for visit in visits if isinstance(visit.content, Tensor)]
        return self._pinned(torch.stack(found)) if found else None

    def _conditioning(self, captions: Sequence[str]) -> Conditioning | None:
        if self._texts is None or not captions:
            return None
        try:
            found = self._texts.rows(captions)
            self._rows = {name: rows[:1] for name, rows in found.items()}
        except UserError as error:
            if not self._rows:
                raise
            self.errors.exhaust(error.message, error.fix)  # see `_Reader.visit`
            found = {name: row.expand(len(captions), *row.shape[1:]).clone() for name, row in self._rows.items()}
        return {name: self._pinned(rows) for name, rows in found.items()}

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pins else tensor

    def _moved(self, one: MicroBatch) -> MicroBatch:
        def there(tensor: Tensor) -> Tensor:
            return tensor.to(self._world.device, non_blocking=self._pins)

        def rows_there(rows: Conditioning | None) -> Conditioning | None:
            return rows and {name: each if name in self._host_conditioning else there(each) for name, each in rows.items()}

        return replace(
            one,
            pixels=None if one.pixels is None else normalised(there(one.pixels)),
            latents=None if one.latents is None else there(one.latents),
            conditioning=rows_there(one.conditioning),
            second_captions={
                name: replace(each, conditioning=rows_there(each.conditioning)) for name, each in one.second_captions.items()
            },
            columns={name: there(each) for name, each in one.columns.items()},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Visit:
    """One sample for training: the image's bytes (3, H, W), or its latents (C, h, w)."""

    content: Bytes | Tensor
    caption: str
    key: str
    size: SizeConditioning
    dataset: DatasetSpec
    columns: Mapping[str, Tensor] = field(default_factory=dict)


class _Reader:
    """Loads one sample at a time, in any thread, from the cache or the storage; replaces what cannot be read."""

    def __init__(
        self,
        data: PreparedData,
        errors: ErrorBudget,
        cache_bytes: int,
        latents: CachedLatents | None,
        latent_shape: Callable[[int, int], Sequence[int]],
        *,
        texts_cached: bool,
    ) -> None:
        self._data = data
        self._texts_cached = texts_cached
        self._errors = errors
        self._latents = latents
        self._bad: set[int] = set(latents.broken) if latents is not None else set()
        self._cache: dict[int, Bytes] = {}
        self._substitutes: dict[Bucket, tuple[Tensor, CropOffset]] = {}
        self._cache_bytes_free = cache_bytes
        self._latent_shape = latent_shape
        self._columns = {name: column for dataset in data.datasets for name, column in dataset.columns.items()}
        self.passes: PlannedPasses | None = None

    def needs(self, batch: GlobalBatch, samples: Numbers) -> frozenset[str]:
        """The passes for these samples of a global batch."""
        if self.passes is None:
            return frozenset()
        datasets = np.unique(np.searchsorted(self._data.offsets, samples, side="right") - 1)
        return self.passes.needs(batch.position, [self._data.datasets[number].spec for number in datasets.tolist()])

    def encoded(self, batch: GlobalBatch, slots: Iterable[int]) -> dict[int, tuple[Tensor, CropOffset]]:
        """Returns the latents of slots, by slot, read together. Those that are left out have to be read one by one."""
        if self._latents is None:
            return {}
        samples = {slot: self._data.sample(int(batch.samples[slot])) for slot in slots}
        good = [slot for slot, sample in samples.items() if sample.number not in self._bad]
        seed = self._data.order.seed
        images = [(samples[slot].number, samples[slot].is_flipped(seed, batch.numbers[slot])) for slot in good]
        try:
            return dict(zip(good, self._latents.get_many(images, batch.bucket), strict=True))
        except UserError:
            return {}  # reading them one by one finds out which it is

    def visit(self, batch: GlobalBatch, slot: int, encoded: Mapping[int, tuple[Tensor, CropOffset]]) -> _Visit:
        """`encoded` are latents that are read already, by slot."""
        number, planned = batch.numbers[slot], self._data.sample(int(batch.samples[slot]))
        for sample in chain([planned], map(self._data.sample, self._data.order.replacements(batch, slot))):
            if sample.number in self._bad:
                continue
            needs = [self.needs(batch, np.array([each.number])) for each in (sample, planned) if sample is not planned]
            if len(set(needs)) > 1:
                continue  # all ranks have to know, without reading, which forward passes there are
            try:
                if sample is planned and slot in encoded:
                    self._substitutes[batch.bucket] = encoded[slot]
                    return self._complete(sample, *encoded[slot], batch, number)
                if self._latents is not None:
                    return self._complete(sample, *self._encoded(sample, batch.bucket, number), batch, number)
                image = self._load(sample, batch.bucket)
                return self._complete(sample, *self._crop(sample, image, batch.bucket, number), batch, number)
            except BadSampleError as error:
                self._bad.add(sample.number)
                self._errors.record(Quarantined(dataset=sample.dataset.spec.id, key=sample.key, reason=str(error)))
            if self._errors.exhausted:
                break
        else:
            self._errors.exhaust(f"no image of bucket {batch.bucket} can be read")
        # The run stops after the next agreement of all ranks; until then this rank has to continue with the others.
        width, height = batch.bucket.width, batch.bucket.height
        white = np.full((3, height, width), 255, dtype=np.uint8)
        content, _ = self._substitutes.get(batch.bucket, (white, None))
        size, columns = SizeConditioning.of((width, height)), self._read_columns(planned, {}, batch, (0, 0), number)
        return _Visit(content=content, caption="", key="", size=size, dataset=planned.dataset.spec, columns=columns)

    def _encoded(self, sample: Sample, bucket: Bucket, number: int) -> tuple[Tensor, CropOffset]:
        """Returns the latents of a sample; if they cannot be read, those of another one, until all ranks stop together."""
        assert self._latents is not None
        try:
            self._substitutes[bucket] = found = self._latents.get(
                sample.number, bucket, flipped=sample.is_flipped(self._data.order.seed, number)
            )
        except UserError as error:
            if bucket not in self._substitutes:
                raise
            self._errors.exhaust(error.message, error.fix)
            return self._substitutes[bucket]
        return found

    def _load(self, sample: Sample, bucket: Bucket) -> Bytes:
        """Returns the scaled image of a sample. Raises BadSampleError if it is unusable."""
        if (image := self._cache.get(sample.number)) is not None:
            return image
        image = read_image(sample, bucket)
        # Two threads may count at once; then the limit is exceeded by an image or two, which is harmless.
        if image.nbytes <= self._cache_bytes_free:
            self._cache_bytes_free -= image.nbytes
            self._cache[sample.number] = image
        return image

    def _crop(self, sample: Sample, image: Bytes, bucket: Bucket, number: int) -> tuple[Bytes, CropOffset]:
        """Returns a scaled image cropped to its bucket, and the offset; a random one depends on the number of the visit."""
        seed = self._data.order.seed
        flipped = sample.is_flipped(seed, number)
        if image.shape == (3, bucket.height, bucket.width):
            return mirrored(image, bucket, (0, 0)) if flipped else (image, (0, 0))
        fractions = uniform(derive_seed("across", seed, number)), uniform(derive_seed("down", seed, number))
        offset = sample.crop_settings.offset((image.shape[2], image.shape[1]), bucket, fractions)
        return mirrored(image, bucket, offset) if flipped else (crop(image, bucket, offset), offset)

    def _read_columns(
        self, sample: Sample, own: Mapping[str, Column], batch: GlobalBatch, offset: CropOffset, number: int
    ) -> dict[str, Tensor]:
        """The values of all columns of the run for a visit: from those that the sample has as its `own`, else neutral ones."""
        if not self._columns:
            return {}
        height, width = self._latent_shape(batch.bucket.width, batch.bucket.height)[-2:]
        flipped = sample.is_flipped(self._data.order.seed, number)
        scaled = sample.crop_settings.resized(*sample.size, batch.bucket)
        framing = Framing(bucket=batch.bucket, scaled=scaled, offset=offset, flipped=flipped, latents=(width, height))
        return {
            name: own[name].read(sample, framing) if name in own else column.neutral(framing)
            for name, column in self._columns.items()
        }

    def _complete(self, sample: Sample, content: Bytes | Tensor, offset: CropOffset, batch: GlobalBatch, number: int) -> _Visit:
        """Adds caption, size conditioning and columns to an image; epoch and number of the visit determine which caption.

        Raises BadSampleError for an image whose columns cannot be used.
        """
        return _Visit(
            content=content,
            caption=sample.text(self._data.order.seed, epoch=batch.epoch, visit=number, cached=self._texts_cached),
            key=sample.name,
            size=SizeConditioning.of(sample.size, offset),
            dataset=sample.dataset.spec,
            columns=self._read_columns(sample, sample.dataset.columns, batch, offset, number),
        )


def _normalised(images: Bytes) -> NDArray[np.float32]:
    """Like `images.normalised`, bit for bit. In numpy, which stays on this thread: torch would start threads of its own."""
    values = images.astype(np.float32)
    values /= np.float32(127.5)
    values -= np.float32(1.0)
    return values
