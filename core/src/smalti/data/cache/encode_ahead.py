"""Before training: encode every image and every text once, on all ranks, cache the results, and release the encoders.

What is cached already, by this run or another one with the same encoders, is not encoded again. Keys are assigned to ranks by
their value, so shares are disjoint for any number of ranks and whatever each of them sees. All ranks communicate every few
seconds: then none waits longer than that for a slower one, a failure on one rank reaches all at once, and the main rank can
report the progress of all.

Shapes: B images or texts of a batch, always the same number, because kernels sum in another order for another batch size. A
short batch is padded with its first member.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from smalti.config import Config, DataOptions, ValidationPrompt, validation_prompts
from smalti.data.buckets import Bucket
from smalti.data.cache.embedding_cache import CachedLatents, CachedTexts, CropOffset
from smalti.data.cache.tensor_store import Entry, FolderStore, TensorStore
from smalti.data.from_options import CacheFolders
from smalti.data.images import Bytes, normalised
from smalti.data.prepared import PreparedData
from smalti.data.scan.quarantine import BadSampleError, ErrorBudget, Quarantined
from smalti.data.threads import Threads
from smalti.diffusion import Conditioning
from smalti.errors import PreflightError, UserError
from smalti.models import Cacheable, Encoding, KeepsRawLatents, ModelFamily, latents_to_keep
from smalti.parallel import Communicator, RankError, run_on_all_ranks
from smalti.rundir import Phases
from smalti.system import preemption_as_exception, write_json_atomically
from smalti.types import World

T = TypeVar("T")
R = TypeVar("R")

_ROUND_SECONDS = 5.0
_LINE_SECONDS = 10.0
_VISIBLE_SECONDS = 90.0
"""How long a network file system may take to show what another node has written."""
_PART_BYTES = 256 * 2**20
_PART_ENTRIES = 4096
_PART_SECONDS = 60.0
"""A part is written when it is this large, or this old: at most that much work is lost if the process dies."""
_DECODING_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Cached latents and texts; None for what is encoded in every step."""

    latents: CachedLatents | None = None
    texts: CachedTexts | None = None
    held_out: CachedLatents | None = None
    """Latents of the held-out images, if there are any."""

    def conditioning(self, texts: Sequence[str], device: str, *, negative: bool = False) -> Conditioning | None:
        """Returns the conditioning of these captions, on the device; None if texts are encoded in every step.

        With `negative`, they are negative prompts.
        """
        if self.texts is None:
            return None
        return {name: rows.to(device) for name, rows in self.texts.rows(texts, negative=negative).items()}


def encode_ahead(
    config: Config,
    family: ModelFamily,
    data: PreparedData,
    communicator: Communicator,
    folders: CacheFolders,
    log: Path,
    phases: Phases | None = None,
    prompts: Sequence[ValidationPrompt] | None = None,
) -> Encoded:
    """Encode what is missing, then release the encoders. *Collective*. Does nothing for a family that is not `Cacheable`.

    Call it before the model is built: encoders and model need not fit into memory together.

    `log` is a folder for this rank's list of broken images. `prompts` are those of validation, None for those that `config`
    names. What was encoded before a signal or Ctrl-C is kept. Raises
    PreflightError on all ranks if one of them fails: not enough space, no permission to write, more unusable images than the
    error budget allows.
    """
    if not isinstance(family, Cacheable):
        return Encoded()
    options, world = config[DataOptions], communicator.world
    work = _Encoder(family=family, communicator=communicator, batch=options.train_batch_size, phases=phases or Phases())
    every = [data] if data.held_out is None else [data, data.held_out]
    texts, latents = None, list[CachedLatents]()
    try:
        with torch.no_grad():
            if not options.text_cache_disable:
                texts = CachedTexts(*work.open("texts", [folders.texts]))
                captions = chain.from_iterable(all_captions(one) for one in every)
                prompts = validation_prompts(config) if prompts is None else prompts
                work.encode_texts(texts, {"", *captions, *(each.prompt for each in prompts)})
                work.encode_texts(texts, {each.negative_prompt for each in prompts} - {""}, negative=True)
                family.release_encoder("texts")
            if not options.vae_cache_disable:
                for one in every:
                    places = [folders.latents[dataset.spec.id] for dataset in one.datasets]
                    latents.append(CachedLatents(one, work.open("latents", places)))
                    broken = log / f"encoding.rank-{world.rank}.quarantine.jsonl"
                    work.encode_images(latents[-1], one, one.error_budget(broken))
                family.release_encoder("latents")
    except RankError as failure:
        raise PreflightError(str(failure), fix=failure.fix) from failure
    found = dict(zip(("latents", "held_out"), latents, strict=False))
    return Encoded(texts=texts, **found)


def all_captions(data: PreparedData) -> Iterator[str]:
    """Yields every text that a visit may pick."""
    for content in data.order.buckets:
        for sample in content.samples.tolist():
            position, row = data.locate(sample)
            yield from data.datasets[position].texts(row)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A sample to encode, as it is or mirrored, and the key for its latents."""

    sample: int
    bucket: Bucket
    key: str
    flipped: bool


@dataclass(kw_only=True)
class _Encoder:
    """Encodes texts and images on all ranks."""

    family: ModelFamily
    communicator: Communicator
    batch: int
    phases: Phases

    @property
    def world(self) -> World:
        return self.communicator.world

    def open(self, kind: Encoding, folders: Sequence[Path]) -> list[TensorStore]:
        """Returns for each folder the store for this family's encoder in it. *Collective*."""
        identities = run_on_all_ranks(self.communicator, lambda: self._identity(kind))
        if different := [rank for rank, other in enumerate(identities) if other != identities[0]]:
            raise UserError(
                f"rank {different[0]} encodes {kind} with other weights or settings than rank 0",
                fix="use the same model on every node",
            )
        name = f"{kind}-{self.family.name}-{sha256(identities[0].encode()).hexdigest()[:16]}"
        stores: dict[Path, TensorStore] = {folder: FolderStore(folder / name) for folder in folders}

        def describe() -> str:
            for folder in stores if self.world.is_main else ():
                _describe(folder / name, identities[0])
            return ""

        run_on_all_ranks(self.communicator, describe)
        return [stores[folder] for folder in folders]

    def _identity(self, kind: Encoding) -> str:
        assert isinstance(self.family, Cacheable)
        identity = {"kind": kind, "family": self.family.name, **self.family.encoder_identity(kind)}
        if kind == "latents" and isinstance(self.family, KeepsRawLatents):
            identity["normalised"] = False  # older caches of the family hold normalised latents
        return json.dumps(identity, sort_keys=True)

    # --- texts ------------------------------------------------------------------------------------------------------

    def encode_texts(self, texts: CachedTexts, wanted: Iterable[str], *, negative: bool = False) -> None:
        """Encode all these captions, or negative prompts. *Collective*."""
        by_key = {texts.key(text, negative=negative): text for text in wanted}
        encoder = self.family.encode_negative_prompts if negative else self.family.encode_captions
        missing = texts.store.missing(by_key)
        mine = [by_key[key] for key in sorted(missing) if self._is_mine(key)]

        def encode(batch: list[str]) -> int:
            rows = {name: values.cpu() for name, values in encoder(_padded(batch, self.batch)).items()}
            keys = [texts.key(text, negative=negative) for text in batch]
            pending.add({key: {name: rows[name][row] for name in rows} for row, key in enumerate(keys)})
            return len(batch)

        pending = _Pending(texts.store)
        self._progress("texts", len(by_key), map(encode, _batches(mine, self.batch)), len(mine), pending.flush)
        self._wait_until_visible(texts.store, by_key)

    # --- images ---------------------------------------------------------------------------------------------------

    def encode_images(self, latents: CachedLatents, data: PreparedData, errors: ErrorBudget) -> None:
        """Encode all images; those that cannot be read are recorded in `latents.broken`. *Collective*."""
        if self.world.is_main and any(
            crop_settings.crop and crop_settings.crop_style == "random" for crop_settings in data.crop_settings
        ):
            _ProgressLine.say(
                "random crops are chosen once per image, because latents are cached; --vae_cache_disable crops at each visit"
            )
        wanted = [
            _Task(
                sample=sample, bucket=content.bucket, key=latents.key(sample, content.bucket, flipped=flipped), flipped=flipped
            )
            for content in data.order.buckets
            for sample in content.samples.tolist()
            for flipped in data.datasets[data.locate(sample)[0]].flips
        ]
        missing = {store: store.missing(one.key for one in wanted) for store in dict.fromkeys(latents.stores)}
        mine = [one for one in wanted if one.key in missing[latents.store(one.sample)] and self._is_mine(one.key)]
        batches = chain.from_iterable(_batches(group, self.batch) for group in _by_bucket(mine))
        pending = {store: _Pending(store) for store in missing}
        broken: dict[int, str] = {}

        def encode(batch: Sequence[tuple[_Task, Bytes, CropOffset] | BadSampleError]) -> int:
            good = [one for one in batch if not isinstance(one, BadSampleError)]
            if errors.exhausted:
                raise PreflightError(errors.exhausted, fix="fix or remove such files, or raise --data_error_budget")
            if good:
                pixels = torch.from_numpy(np.stack(_padded([image for _, image, _ in good], self.batch)))
                made = latents_to_keep(self.family, normalised(pixels.to(self.world.device))).cpu()
                for row, (one, _, offset) in enumerate(good):
                    pending[latents.store(one.sample)].add({one.key: latents.entry(made[row], offset)})
            return len(batch)

        def read(one: _Task) -> tuple[_Task, Bytes, CropOffset] | BadSampleError:
            try:
                return one, *latents.image(one.sample, one.bucket, flipped=one.flipped)
            except BadSampleError as error:
                position, row = data.locate(one.sample)
                dataset = data.datasets[position]
                errors.record(Quarantined(dataset=dataset.spec.id, key=dataset.index.key(row), reason=str(error)))
                broken[one.sample] = str(error)
                return error

        def flush(*, everything: bool) -> None:
            for one in pending.values():
                one.flush(everything=everything)

        with Threads(_DECODING_THREADS, "smalti-decode") as pool:
            ready = _prefetch(pool, read, batches, ahead=2 + 2 * _DECODING_THREADS // self.batch)
            self._progress("latents", len(wanted), map(encode, ready), len(mine), flush)
        self._share_broken(latents, data, broken)
        for store in pending:
            keys = (one.key for one in wanted if one.sample not in latents.broken and latents.store(one.sample) is store)
            self._wait_until_visible(store, keys)

    def _share_broken(self, latents: CachedLatents, data: PreparedData, broken: Mapping[int, str]) -> None:
        """Exchange which samples are broken; raises PreflightError if there are too many. *Collective*."""
        found: dict[str, str] = {}
        for answer in run_on_all_ranks(self.communicator, lambda: json.dumps(broken)):
            found |= json.loads(answer)
        latents.broken = frozenset(int(sample) for sample in found)
        fix = "fix or remove such files, or raise --data_error_budget"
        count = len(found) + data.unusable
        if found and count > data.allowed_errors:
            message = f"{count} samples cannot be used, more than the error budget of {data.allowed_errors}; for example: "
            raise PreflightError(message + next(iter(found.values())), fix=fix)
        for content in data.order.buckets:
            if latents.broken.issuperset(content.samples.tolist()):
                raise PreflightError(f"no image of bucket {content.bucket} can be read", fix=fix)

    # --- all ranks together -----------------------------------------------------------------------------------------

    def _is_mine(self, key: str) -> bool:
        return int(key[:8], 16) % self.world.size == self.world.rank

    def _progress(self, what: str, wanted: int, batches: Iterator[int], mine: int, flush: Callable[..., None]) -> None:
        """Process this rank's batches, each of which returns its number of items; returns when all ranks are done."""
        total = sum(map(int, run_on_all_ranks(self.communicator, lambda: str(mine))))
        if total == 0:
            return
        self.phases.enter("encoding", total=total, unit="images" if what == "latents" else what)
        show = _ProgressLine(what=what, total=total) if self.world.is_main else None
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

    def _wait_until_visible(self, store: TensorStore, keys: Iterable[str]) -> None:
        """Wait until this rank sees what all ranks have written. *Collective*."""
        wanted = list(keys)

        def look() -> str:
            deadline = time.monotonic() + _VISIBLE_SECONDS
            while missing := store.missing(wanted):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{len(missing)} of {len(wanted)} entries that other ranks have written are not in {store}",
                        fix="set --cache_dir to a folder that all nodes share",
                    )
                time.sleep(1.0)
            return ""

        run_on_all_ranks(self.communicator, look)


class _Pending:
    """Entries that are collected until they make up a part of the store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._entries: dict[str, Entry] = {}
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, entries: Mapping[str, Entry]) -> None:
        if not self._entries:
            self._since = time.monotonic()
        # Rows of a batch are views of it, which would keep all of it in memory.
        self._entries |= {key: {name: tensor.clone() for name, tensor in entry.items()} for key, entry in entries.items()}
        self._bytes += sum(tensor.nbytes for entry in entries.values() for tensor in entry.values())

    def flush(self, *, everything: bool) -> None:
        """Write a part, if it is large or old enough."""
        due = self._bytes >= _PART_BYTES or len(self._entries) >= _PART_ENTRIES
        if self._entries and (everything or due or time.monotonic() - self._since >= _PART_SECONDS):
            self._store.put(self._entries)
            self._entries, self._bytes = {}, 0


class _ProgressLine:
    """Prints the progress of all ranks to standard error, every few seconds and at the end."""

    def __init__(self, *, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._begun = self._shown = time.monotonic()

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now - self._shown < _LINE_SECONDS and done < self._total:
            return
        self._shown = now
        rate = done / max(now - self._begun, 1e-9)
        remaining = timedelta(seconds=round((self._total - done) / rate)) if rate else "-"
        self.say(f"{self._what} {done:,}/{self._total:,}  {rate:.1f}/s  {remaining} remaining")

    @staticmethod
    def say(text: str) -> None:
        print(f"smalti: {text}", file=sys.stderr, flush=True)


def _describe(place: Path, identity: str) -> None:
    """Make the folder of a store, with a file that describes its encoder."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "encoder.json").exists():
            write_json_atomically(place / "encoder.json", json.loads(identity))
    except OSError as error:
        raise UserError(
            f"cannot cache encoded images and texts in {place}: {error.strerror or error}",
            fix="--cache_dir=FOLDER, or encode in every step with --vae_cache_disable --text_cache_disable",
        ) from error


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def _by_bucket(images: Iterable[_Task]) -> list[list[_Task]]:
    groups: dict[Bucket, list[_Task]] = {}
    for one in images:
        groups.setdefault(one.bucket, []).append(one)
    return list(groups.values())


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
