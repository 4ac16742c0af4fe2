"""One part of what a run would encode, without the run: no model, no optimizer, no run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import Config, UserError, World
from smalti.config import DataOptions, RunOptions
from smalti.data import catalog_of, scan_data, scan_progress
from smalti.parallel import GlooCommunicator, accelerator_kind
from smalti.plugins import Plugins, find_family
from smalti.rundir import Phases
from smalti.training import periodic_work
from smalti_cache.encode_ahead import open_encoder
from smalti_cache.options import CacheOptions
from smalti_cache.wanted import Part


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """What a part has: how many images (mirrored ones counted) and texts, and how many of them were encoded now.

    `unusable` are the keys of images that cannot be read.
    """

    images: int
    images_encoded: int
    texts: int
    texts_encoded: int
    unusable: tuple[str, ...]


def encode_part(config: Config, plugins: Plugins, part: Part, say: Callable[[str], object]) -> EncodedPart:
    """Encode the images and texts of a part that are not in the caches of the configuration, on one device.

    `say` gets notices about the data. Raises UserError if there is nothing that could be encoded, or no place for it.
    """
    family, options = find_family(config, plugins), config[DataOptions]
    if not family.cacheable or (options.vae_cache_disable and options.text_cache_disable):
        why = "--vae_cache_disable --text_cache_disable" if family.cacheable else f"{family.name} encodes nothing ahead"
        raise UserError(f"there is nothing to encode before training: {why}", fix="start the training")
    if config[CacheOptions].cache_dir is None and config[RunOptions].output_dir is None:
        raise UserError("nothing says where the cache is", fix="--cache_dir=FOLDER, a folder that the training uses too")
    kind, phases, counts = accelerator_kind(config), Phases(), Counter[tuple[str, str]]()

    def count(what: str, wanted: int, missing: int) -> None:
        counts[what, "wanted"] += wanted
        counts[what, "missing"] += missing

    encoder = replace(open_encoder(config, family, catalog_of(plugins)), part=part, report=count)
    encoder.check()
    work = periodic_work(config, plugins)
    texts = [text for one in work for text in one.texts]
    negative = [text for one in work for text in one.negative_texts]
    world = World(device="cpu" if kind == "cpu" else f"{kind}:0")
    family.to(world.device)
    with TemporaryDirectory(prefix="smalti-encode-") as folder:
        data = scan_data(config, plugins, family.alignment, Path(folder), scan_progress(phases))
        for notice in data.notices:
            say(notice)
        communicator = GlooCommunicator(world=world, group=None)
        encoded = encoder.encode(data, communicator, Path(folder), phases, texts, negative)
        unusable = []
        for one, latents in ((data, encoded.latents), (data.held_out, encoded.held_out)):
            if one is None or latents is None:
                continue
            for sample in sorted(latents.broken):
                position, row = one.locate(sample)
                unusable.append(one.datasets[position].index.key(row))
    return EncodedPart(
        images=counts["images", "wanted"],
        images_encoded=counts["images", "missing"] - len(unusable),
        texts=counts["texts", "wanted"],
        texts_encoded=counts["texts", "missing"],
        unusable=tuple(unusable),
    )
