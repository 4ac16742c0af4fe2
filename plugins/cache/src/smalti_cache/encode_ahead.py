"""Before training: encode every image and every text once, on all ranks, cache the results, and release the encoders.

What is cached already, by this run or another one with the same encoders, is not encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from smalti import Config, PreflightError
from smalti.config import DataOptions
from smalti.data import Catalog, Encoded, PreparedData
from smalti.models import ModelFamily
from smalti.parallel import Communicator, RankError
from smalti.rundir import Phases
from smalti_cache.embedding_cache import CachedLatents, CachedTexts
from smalti_cache.encoder import Encoder
from smalti_cache.places import CacheFolders, cache_folders, check_places
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
        family, folders = self.family, self.folders
        options, world = self.config[DataOptions], communicator.world
        work = Encoder(
            family=family,
            communicator=communicator,
            folders=folders,
            batch=options.train_batch_size,
            phases=phases,
            part=self.part,
            report=self.report,
        )
        every = [data] if data.held_out is None else [data, data.held_out]
        cached, latents = None, list[CachedLatents]()
        try:
            with torch.no_grad():
                if not options.text_cache_disable:
                    cached = _encode_texts(work, every, ["", *texts], folders)
                    work.encode_texts(cached, [], negative_texts, negative=True)
                    family.release_encoder("texts")
                if not options.vae_cache_disable:
                    for one in every:
                        places = [folders.latents[dataset.spec.id] for dataset in one.datasets]
                        latents.append(CachedLatents(one, work.open("latents", places), ahead=folders.read_ahead))
                        broken = directory / f"encoding.rank-{world.rank}.quarantine.jsonl"
                        work.encode_images(latents[-1], one.error_budget(broken))
                    family.release_encoder("latents")
        except RankError as failure:
            raise failure.for_user(PreflightError) from failure
        found = dict(zip(("latents", "held_out"), latents, strict=False))
        return Encoded(texts=cached, **found)


def open_encoder(config: Config, family: ModelFamily, catalog: Catalog) -> AheadEncoder:
    """What the core calls for a run."""
    return AheadEncoder(config=config, family=family, folders=cache_folders(config, catalog))


def _encode_texts(work: Encoder, data: Sequence[PreparedData], prompts: Sequence[str], folders: CacheFolders) -> CachedTexts:
    """Encode the captions of each dataset in the store of its place, and the prompts in that of the others. *Collective*."""
    datasets = [dataset.spec.id for one in data for dataset in one.datasets]
    places = [folders.own_texts.get(name, folders.texts) for name in datasets]
    default, *stores = work.open("texts", [folders.texts, *places])
    others = [store for store in dict.fromkeys(stores) if store is not default]
    for store in (default, *others):
        ids = {name for name, other in zip(datasets, stores, strict=True) if other is store}
        work.encode_texts(CachedTexts(store), data, prompts if store is default else (), ids=ids)
    return CachedTexts(default, others)
