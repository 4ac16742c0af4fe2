"""Encodes what is missing in the caches, on all ranks.

Shares of ranks are disjoint, because all ranks see the same packs: those that the main rank lists. All ranks communicate every
few seconds: then none waits longer than that for a slower one, a failure on one rank reaches all at once, and the main rank can
report the progress of all.

Shapes: B images or texts of a batch, always the same number, because kernels sum in another order for another batch size. A
short batch is padded with its first member.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from smalti import PreflightError, UserError, World
from smalti.data import (
    BadSampleError,
    Bucket,
    Bytes,
    CropOffset,
    ErrorBudget,
    LocalStorage,
    MissingFileError,
    PreparedData,
    Quarantined,
    Storage,
    StorageError,
    Threads,
    normalised,
)
from smalti.models import Encoding, ModelFamily
from smalti.parallel import Communicator, run_on_all_ranks
from smalti.rundir import Phases
from smalti.system import load_json, preemption_as_exception
from smalti_cache.contents import DESCRIPTION, digest_of
from smalti_cache.directory import default_folder
from smalti_cache.embedding_cache import CachedLatents, CachedTexts
from smalti_cache.keys import Key
from smalti_cache.pending import Pending, ProgressLine
from smalti_cache.places import CacheFolders, CachePlace
from smalti_cache.rounds import run_in_rounds
from smalti_cache.store import PackStore
from smalti_cache.wanted import Image, Part, WantedImages, WantedTexts

T = TypeVar("T")
R = TypeVar("R")
_Read = tuple[Image, Bytes, CropOffset] | BadSampleError

_ROUND_SECONDS = 5.0
_VISIBLE_SECONDS = 90.0
"""How long a network file system may take to show what another node has written."""
_DECODING_THREADS = 8


@dataclass(kw_only=True)
class Encoder:
    """Encodes texts and images on all ranks."""

    family: ModelFamily
    communicator: Communicator
    folders: CacheFolders
    batch: int
    phases: Phases
    part: Part = field(default_factory=Part)
    """Of the images and texts that all of these ranks encode."""
    report: Callable[[str, int, int], object] = lambda what, wanted, missing: None
    """Called with "images" or "texts", how many there are in this part, and how many of them were missing."""

    @property
    def world(self) -> World:
        return self.communicator.world

    def open(self, kind: Encoding, places: Sequence[CachePlace]) -> list[PackStore]:
        """Returns for each place the store for this family's encoder in it. *Collective*."""
        identities = run_on_all_ranks(self.communicator, lambda: self.identity(kind))
        if different := [rank for rank, other in enumerate(identities) if other != identities[0]]:
            raise UserError(
                f"rank {different[0]} encodes {kind} with other weights or settings than rank 0",
                fix="use the same model on every node",
            )
        name = f"{kind}-{self.family.name}-{digest_of(identities[0])}"
        stores: dict[object, PackStore] = {}
        folder = self.folders.index_folder or default_folder()

        def open_all() -> str:
            for place in places:
                if place.id not in stores:
                    storage, prefix = place.open(name, self.folders.catalog)
                    if self.world.is_main:
                        _describe(storage, f"{prefix}/{DESCRIPTION}" if prefix else DESCRIPTION, identities[0])
                    stores[place.id] = PackStore(
                        storage,
                        prefix,
                        folder=folder,
                        compress=self.folders.compress,
                        copies=None if place.spec is None else self.folders.local_copies,
                    )
            return ""

        run_on_all_ranks(self.communicator, open_all)
        if self.world.is_main:
            for store in stores.values():
                store.mark_used()
        return [stores[place.id] for place in places]

    def identity(self, kind: Encoding) -> str:
        """Returns what identifies the encoder of this kind, in JSON: its store is named after it."""
        identity = {"kind": kind, "family": self.family.name, **self.family.encoder_identity(kind)}
        if kind == "latents" and type(self.family).raw_latents is not ModelFamily.raw_latents:
            identity["normalised"] = False  # older caches of the family hold normalised latents
        return json.dumps(identity, sort_keys=True)

    # --- texts ------------------------------------------------------------------------------------------------------

    def encode_texts(
        self,
        texts: CachedTexts,
        data: Sequence[PreparedData],
        others: Sequence[str],
        *,
        negative: bool = False,
        ids: Collection[str] | None = None,
    ) -> None:
        """Encode all texts that visits may pick, and others. *Collective*.

        With `negative`, the others are negative prompts. `ids` are the datasets whose texts are meant, None for all.
        """
        self._refresh([texts.store])
        part = self.part.divided(self.world)
        with closing(WantedTexts(texts, data, others, part, negative=negative, ids=ids)) as wanted:
            self._encode_texts(texts, wanted, negative=negative)
        self._refresh([texts.store])

    def _encode_texts(self, texts: CachedTexts, wanted: WantedTexts, *, negative: bool) -> None:
        counts = self._count([texts.store], lambda: [wanted.count()])
        encoder = self.family.encode_negative_prompts if negative else self.family.encode_captions

        def encode(batch: list[tuple[str, Key]]) -> int:
            rows = {name: values.cpu() for name, values in encoder(_padded([text for text, _ in batch], self.batch)).items()}
            pending.add({key: {name: rows[name][row] for name in rows} for row, (_, key) in enumerate(batch)})
            return len(batch)

        total, mine = sum(each for each, _ in counts), counts[self.world.rank][1]
        with Threads(1, "smalti-write") as thread:
            pending = Pending(texts.store, thread)
            self._progress("texts", total, map(encode, _batches(wanted.missing(), self.batch)), mine, pending.flush)

    # --- images ---------------------------------------------------------------------------------------------------

    def encode_images(self, latents: CachedLatents, errors: ErrorBudget) -> None:
        """Encode all images; those that cannot be read are recorded in `latents.broken`. *Collective*."""
        settings = latents.data.crop_settings
        if self.world.is_main and any(one.crop and one.crop_style == "random" for one in settings):
            ProgressLine.say(
                "random crops are chosen once per image, because latents are cached; --vae_cache_disable crops at each visit"
            )
        stores = list(dict.fromkeys(latents.stores))
        self._refresh(stores)
        wanted = WantedImages(latents, self.part, ProgressLine.say if self.world.is_main else None)
        counts = self._count(stores, lambda: [wanted.count(number) for number in wanted.share(self.world)])
        missing = [each for _, each in counts]
        first, last = (sum(missing) * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        broken: dict[int, str] = {}
        with Threads(_DECODING_THREADS, "smalti-decode") as pool, Threads(1, "smalti-write") as thread:
            pending = {store: Pending(store, thread) for store in stores}

            def encode(batch: Sequence[_Read]) -> int:
                if errors.exhausted:
                    raise PreflightError(errors.exhausted, fix="fix or remove such files, or raise --data_error_budget")
                return self._encode_images(latents, batch, pending)

            def flush(*, everything: bool) -> None:
                for one in pending.values():
                    one.flush(everything=everything)

            batches = _by_bucket(_some(wanted, missing, first, last), self.batch)
            read = _reading(latents, errors, broken)
            ready = _prefetch(pool, read, batches, ahead=2 + 2 * _DECODING_THREADS // self.batch)
            self._progress("latents", sum(each for each, _ in counts), map(encode, ready), last - first, flush)
        self._share_broken(latents, latents.data, broken)
        self._refresh(stores)

    def _encode_images(self, latents: CachedLatents, batch: Sequence[_Read], pending: Mapping[PackStore, Pending]) -> int:
        good = [one for one in batch if not isinstance(one, BadSampleError)]
        if good:
            pixels = torch.from_numpy(np.stack(_padded([image for _, image, _ in good], self.batch)))
            made = self.family.raw_latents(normalised(pixels.to(self.world.device))).cpu()
            for row, (one, _, offset) in enumerate(good):
                pending[latents.store(one.sample)].add({one.key: latents.entry(made[row], offset)})
        return len(batch)

    def _share_broken(self, latents: CachedLatents, data: PreparedData, broken: Mapping[int, str]) -> None:
        """Exchange which samples are broken; raises PreflightError if there are too many. *Collective*."""
        found: dict[str, str] = {}
        for answer in run_on_all_ranks(self.communicator, lambda: json.dumps(broken)):
            found |= load_json(answer)
        latents.broken = frozenset(int(sample) for sample in found)
        fix = "fix or remove such files, or raise --data_error_budget"
        count = len(found) + data.unusable
        if found and count > data.allowed_errors:
            message = f"{count} samples cannot be used, more than the error budget of {data.allowed_errors}; for example: "
            raise PreflightError(message + next(iter(found.values())), fix=fix)
        for content in data.order.buckets if found else ():
            if latents.broken.issuperset(content.samples.tolist()):
                raise PreflightError(f"no image of bucket {content.bucket} can be read", fix=fix)

    # --- all ranks together -----------------------------------------------------------------------------------------

    def _count(self, stores: Sequence[PackStore], count: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """Returns what `count` returns on all ranks, one after the other: what is wanted, and what is missing. *Collective*."""

        def mine() -> str:
            before = sum(len(store.written) for store in stores)
            counts = count()
            return json.dumps([counts, sum(len(store.written) for store in stores) > before])

        answers = [load_json(answer) for answer in run_in_rounds(self.communicator, mine)]
        if any(adopted for _, adopted in answers):
            if self.world.is_main:
                ProgressLine.say(f"{stores[0]} has entries of an earlier version of smalti, which are used")
            self._refresh(stores)
        return [(wanted, missing) for counts, _ in answers for wanted, missing in counts]

    def _progress(self, what: str, wanted: int, batches: Iterator[int], mine: int, flush: Callable[..., None]) -> None:
        """Process this rank's batches, each of which returns its number of items; returns when all ranks are done."""
        total = sum(map(int, run_on_all_ranks(self.communicator, lambda: str(mine))))
        unit = "images" if what == "latents" else what
        self.report(unit, wanted, total)
        if total == 0:
            return
        self.phases.enter("encoding", total=total, unit=unit)
        show = ProgressLine(what=what, total=total) if self.world.is_main else None
        if show:
            there = "; the others are cached already" if total < wanted else ""
            show.say(f"encoding {total:,} of {wanted:,} {what}{there}")
        done = others = 0

        def some() -> str:
            nonlocal done
            deadline = time.monotonic() + _ROUND_SECONDS
            try:
                while time.monotonic() < deadline and (count := next(batches, 0)):
                    done += count
                    self.phases.advance(others + done)
                    flush(everything=False)
            except KeyboardInterrupt:
                flush(everything=True)  # before communicating: the other ranks may have ended
                raise
            if done == mine:
                flush(everything=True)
            return str(done)

        try:
            with preemption_as_exception():
                while (finished := sum(map(int, run_on_all_ranks(self.communicator, some)))) < total:
                    others = finished - done
                    self.phases.advance(finished)
                    if show:
                        show.update(finished)
        except KeyboardInterrupt:
            flush(everything=True)
            raise
        if show:
            show.update(finished)

    def _refresh(self, stores: Sequence[PackStore]) -> None:
        """Open the packs that the main rank lists, on all ranks, when each sees what all have written. *Collective*."""
        answers = run_on_all_ranks(self.communicator, lambda: json.dumps([store.written for store in stores]))
        written = [[name for some in each for name in some] for each in zip(*map(load_json, answers), strict=True)]

        def listed() -> str:
            found = (store.add_indexes(_list(store, names)) for store, names in zip(stores, written, strict=True))
            return json.dumps(list(found) if self.world.is_main else None)

        lists: list[dict[str, int]] = load_json(run_in_rounds(self.communicator, listed)[0])
        leads = self.world.local_rank == 0

        def look(*, leader: bool) -> str:
            if leads == leader:
                for store, files in zip(stores, lists, strict=True):
                    if leads and not self.world.is_main:
                        _list(store, files)
                    store.refresh(files)
            return json.dumps([sorted(store.unreadable) for store in stores])

        # The other ranks of a node map what its first one has merged.
        run_in_rounds(self.communicator, partial(look, leader=True))
        unreadable = run_in_rounds(self.communicator, partial(look, leader=False))
        if different := [rank for rank, other in enumerate(unreadable) if other != unreadable[0]]:
            raise UserError(
                f"rank {different[0]} cannot read other packs of {', '.join(map(str, stores))} than rank 0 can",
                fix="check the disk or the network of its node; the log says which files and why",
            )


def _list(store: PackStore, names: Iterable[str]) -> dict[str, int]:
    """Returns the files of a store, as soon as these are among them."""
    deadline, names = time.monotonic() + _VISIBLE_SECONDS, set(names)
    while missing := names - (files := store.files()).keys():
        if time.monotonic() > deadline:
            raise UserError(
                f"{len(missing)} of {len(names)} files that other ranks have written are not in {store}",
                fix="use a cache that all nodes see: --cache_dir in a folder that they share, or one bucket under one address",
            )
        time.sleep(1.0)
    return files


def _describe(storage: Storage, key: str, identity: str) -> None:
    """Write a file that describes the encoder of a store, if there is none."""
    try:
        try:
            storage.stat(key)
        except MissingFileError:
            storage.write(key, json.dumps(load_json(identity), indent=2).encode())
    except StorageError as error:
        # The option has no effect on an entry that names another storage.
        elsewhere = "--cache_dir=FOLDER" if isinstance(storage, LocalStorage) else error.fix
        raise UserError(
            f"cannot cache encoded images and texts in {storage.location}: {error.message}",
            fix=f"{elsewhere}, or encode in every step with --vae_cache_disable --text_cache_disable",
        ) from error


def _some(wanted: WantedImages, missing: Sequence[int], first: int, last: int) -> Iterator[Image]:
    """Yields missing images from one to another, counted through all chunks; `missing` is how many each of them has."""
    start = 0
    for number, count in enumerate(missing):
        if start + count > first and start < last:
            yield from islice(wanted.images(number), max(0, first - start), min(count, last - start))
        start += count


def _reading(latents: CachedLatents, errors: ErrorBudget, broken: dict[int, str]) -> Callable[[Image], _Read]:
    """Returns a function that reads an image; what cannot be read is counted in `errors` and added to `broken`."""
    data = latents.data

    def read(one: Image) -> _Read:
        try:
            return one, *latents.image(one.sample, one.bucket, flipped=one.flipped)
        except BadSampleError as error:
            position, row = data.locate(one.sample)
            dataset = data.datasets[position]
            errors.record(Quarantined(dataset=dataset.spec.id, key=dataset.index.key(row), reason=str(error)))
            broken[one.sample] = str(error)
            return error

    return read


def _by_bucket(images: Iterable[Image], size: int) -> Iterator[list[Image]]:
    """Yields batches of one bucket each, as soon as they are complete; those that are not at the end."""
    waiting: dict[Bucket, list[Image]] = {}
    for one in images:
        batch = waiting.setdefault(one.bucket, [])
        batch.append(one)
        if len(batch) == size:
            yield waiting.pop(one.bucket)
    yield from waiting.values()


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch


def _padded(batch: list[T], size: int) -> list[T]:
    return batch + [batch[0]] * (size - len(batch))


def _prefetch(pool: Threads, function: Callable[[T], R], batches: Iterable[list[T]], ahead: int) -> Iterator[list[R]]:
    """Yields the batches in order, with `function` applied to every item; up to `ahead` batches are prepared at once."""
    waiting: list[list[Future[R]]] = []
    for batch in batches:
        waiting.append([pool.submit(function, one) for one in batch])
        if len(waiting) > ahead:
            yield [future.result() for future in waiting.pop(0)]
    for futures in waiting:
        yield [future.result() for future in futures]
