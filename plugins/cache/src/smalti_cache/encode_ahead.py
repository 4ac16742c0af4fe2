"""Before training: encode every image and every text once, on all ranks, cache the results, and release the encoders.

What is cached already, by this run or another one with the same encoders, is not encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from smalti import Config, PreflightError
from smalti.config import DataOptions
from smalti.data import Catalog, Encoded, PreparedData
from smalti.models import Encoding, ModelFamily
from smalti.parallel import Communicator, RankError
from smalti.rundir import Phases
from smalti_cache.embedding_cache import CachedLatents, CachedTexts
from smalti_cache.encoder import Encoder
from smalti_cache.places import CacheFolders, cache_folders, check_places
from smalti_cache.store import PackStore
from smalti_cache.wanted import Part


@dataclass(frozen=True, kw_only=True)
class AheadEncoder:
    """Encodes what the options ask for, for a family that is `cacheable`. `part` and `report` are those of `Encoder`."""

    config: Config
    family: ModelFamily
    folders: CacheFolders
    part: Part = field(default_factory=Part)
    report: Callable[[str, int, int], object] = lambda what, wanted, missing: None

    def check(self) -> None:
        """Raises StorageError if a remote storage in which the run caches latents or texts cannot be listed."""
        check_places(self.config, self.folders)

    def encode(
        self,
        data: PreparedData,
        communicator: Communicator,
        directory: Path,
        phases: Phases,
        texts: Sequence[str],
        negative_texts: Sequence[str],
    ) -> Encoded:
        """Encode what is missing, then release the encoders. *Collective*.

        Call it before the model is built: encoders and model need not fit into memory together.

        `directory` gets this rank's list of broken images. `texts` are further captions. What was encoded before a signal
        or Ctrl-C is kept. Raises PreflightError on all ranks if one of them fails: not enough space, no permission to write,
        more unusable images than the error budget allows.
        """
        opened = self.open(data, communicator, directory, phases, texts, negative_texts)
        cached = opened.encode_texts(self.part)
        opened.release("texts")
        latents = opened.encode_images(self.part)
        opened.release("latents")
        found = dict(zip(("latents", "held_out"), latents, strict=False))
        return Encoded(texts=cached, **found)

    def open(
        self,
        data: PreparedData,
        communicator: Communicator,
        directory: Path | None,
        phases: Phases,
        texts: Sequence[str],
        negative_texts: Sequence[str],
    ) -> OpenEncoder:
        """The same for one part after another, with encoders and stores that stay open between them."""
        work = Encoder(
            family=self.family,
            communicator=communicator,
            folders=self.folders,
            batch=self.config[DataOptions].train_batch_size,
            phases=phases,
            report=self.report,
        )
        every = [data] if data.held_out is None else [data, data.held_out]
        return OpenEncoder(
            options=self.config[DataOptions],
            work=work,
            data=every,
            directory=directory,
            texts=["", *texts],
            negative_texts=negative_texts,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenEncoder:
    """Encodes parts of prepared data on all ranks, with what the options do not disable. See `AheadEncoder.open`."""

    options: DataOptions
    work: Encoder
    data: Sequence[PreparedData]
    directory: Path | None
    """None writes no list of broken images."""
    texts: Sequence[str]
    negative_texts: Sequence[str]

    def encode_texts(self, part: Part) -> CachedTexts | None:
        """Encode the captions of each dataset in the store of its place, and the prompts in that of the others. *Collective*.

        None if texts are not cached. Raises PreflightError on all ranks.
        """
        if self.options.text_cache_disable:
            return None
        with _for_user(), torch.no_grad():
            default, datasets = self._text_stores
            self.work.part = part
            for store in dict.fromkeys((default, *datasets.values())):
                ids = {name for name, other in datasets.items() if other is store}
                self.work.encode_texts(CachedTexts(store), self.data, self.texts if store is default else (), ids=ids)
            cached = CachedTexts(default, [store for store in dict.fromkeys(datasets.values()) if store is not default])
            self.work.encode_texts(cached, [], self.negative_texts, negative=True)
            return cached

    def encode_images(self, part: Part) -> Sequence[CachedLatents]:
        """Encode the images of each of `data`. *Collective*. None of them if latents are not cached.

        Raises PreflightError on all ranks.
        """
        if self.options.vae_cache_disable:
            return ()
        with _for_user(), torch.no_grad():
            self.work.part = part
            name = f"encoding.rank-{self.work.world.rank}.quarantine.jsonl"
            for one in self._latents:
                self.work.encode_images(one, one.data.error_budget(self.directory and self.directory / name))
            return self._latents

    def release(self, kind: Encoding) -> None:
        """Release the encoder of texts or of latents, if it is used."""
        if not (self.options.text_cache_disable if kind == "texts" else self.options.vae_cache_disable):
            self.work.family.release_encoder(kind)

    @cached_property
    def _text_stores(self) -> tuple[PackStore, dict[str, PackStore]]:
        """The store of prompts, and those of the captions of each dataset. *Collective*."""
        folders = self.work.folders
        datasets = [dataset.spec.id for one in self.data for dataset in one.datasets]
        places = [folders.own_texts.get(name, folders.texts) for name in datasets]
        default, *stores = self.work.open("texts", [folders.texts, *places])
        return default, dict(zip(datasets, stores, strict=True))

    @cached_property
    def _latents(self) -> list[CachedLatents]:
        """Those of each of `data`, without what is encoded now. *Collective*."""
        folders, found = self.work.folders, []
        for one in self.data:
            places = [folders.latents[dataset.spec.id] for dataset in one.datasets]
            found.append(CachedLatents(one, self.work.open("latents", places), ahead=folders.read_ahead))
        return found


@contextmanager
def _for_user() -> Iterator[None]:
    """Raises a failure on some rank as a PreflightError."""
    try:
        yield
    except RankError as failure:
        raise failure.for_user(PreflightError) from failure


def open_encoder(config: Config, family: ModelFamily, catalog: Catalog) -> AheadEncoder:
    """What the core calls for a run."""
    return AheadEncoder(config=config, family=family, folders=cache_folders(config, catalog))
