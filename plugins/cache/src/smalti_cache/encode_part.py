"""Parts of what a run would encode, without the run: no model, no optimizer, no run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti import Config, UserError, World
from smalti.config import DataOptions, RunOptions
from smalti.data import PreparedData, catalog_of, scan_data, scan_progress
from smalti.models import Encoding
from smalti.parallel import GlooCommunicator, accelerator_kind
from smalti.plugins import Plugins, find_family
from smalti.rundir import Phases
from smalti.training import periodic_work
from smalti_cache.encode_ahead import OpenEncoder, open_encoder
from smalti_cache.options import CacheOptions
from smalti_cache.wanted import Part

KINDS: tuple[Encoding, ...] = ("texts", "latents")
"""In the order in which they are encoded: the encoders of one are released before those of the next are loaded."""


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """What a part has: how many images (mirrored ones counted) and texts, and how many of them were encoded now.

    `unusable` are the keys of images that cannot be read.
    """

    images: int = 0
    images_encoded: int = 0
    texts: int = 0
    texts_encoded: int = 0
    unusable: tuple[str, ...] = ()

    def __add__(self, other: EncodedPart) -> EncodedPart:
        """What two different parts have."""
        return EncodedPart(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class PartEncoder:
    """Encodes parts of the data of a configuration that are not in its caches, on one device, one part after another.

    Args:
        data: see `smalti.data.scan_data`.
        phases: shows the progress.

    Raises UserError where `check` does.
    """

    def __init__(self, config: Config, plugins: Plugins, data: PreparedData, phases: Phases) -> None:
        check(config, plugins)
        self._config, self._plugins, self._data, self._phases = config, plugins, data, phases
        self._counts = Counter[tuple[str, str]]()
        self._kind: Encoding = KINDS[0]

    def encode(self, part: Part, kind: Encoding) -> EncodedPart:
        """Encode the texts or the images of a part. Texts come first, since their encoders are released for images."""
        self._counts.clear()
        if kind == "texts":
            self._open.encode_texts(part)
            return EncodedPart(texts=self._counts["texts", "wanted"], texts_encoded=self._counts["texts", "missing"])
        if self._kind == "texts":
            self._open.release("texts")
            self._kind = kind
        unusable = []
        for latents in self._open.encode_images(part):
            for sample in sorted(latents.broken):
                position, row = latents.data.locate(sample)
                unusable.append(latents.data.datasets[position].index.key(row))
        encoded = self._counts["images", "missing"] - len(unusable)
        return EncodedPart(images=self._counts["images", "wanted"], images_encoded=encoded, unusable=tuple(unusable))

    def encoder(self, kind: Encoding) -> str:
        """What the encoder of this kind is identified by: the same text for equal weights and settings."""
        return self._open.work.identity(kind)

    @cached_property
    def _open(self) -> OpenEncoder:
        config, plugins = self._config, self._plugins
        family, kind = find_family(config, plugins), accelerator_kind(config)

        def count(what: str, wanted: int, missing: int) -> None:
            self._counts[what, "wanted"] += wanted
            self._counts[what, "missing"] += missing

        encoder = replace(open_encoder(config, family, catalog_of(plugins)), report=count)
        work = periodic_work(config, plugins)
        texts = [text for one in work for text in one.texts]
        negative = [text for one in work for text in one.negative_texts]
        world = World(device="cpu" if kind == "cpu" else f"{kind}:0")
        family.to(world.device)
        return encoder.open(self._data, GlooCommunicator(world=world, group=None), None, self._phases, texts, negative)


def check(config: Config, plugins: Plugins) -> None:
    """Raises UserError if there is nothing that could be encoded, or no place for it."""
    family, options = find_family(config, plugins), config[DataOptions]
    if not family.cacheable or (options.vae_cache_disable and options.text_cache_disable):
        why = "--vae_cache_disable --text_cache_disable" if family.cacheable else f"{family.name} encodes nothing ahead"
        raise UserError(f"there is nothing to encode before training: {why}", fix="start the training")
    if config[CacheOptions].cache_dir is None and config[RunOptions].output_dir is None:
        raise UserError("nothing says where the cache is", fix="--cache_dir=FOLDER, a folder that the training uses too")
    open_encoder(config, family, catalog_of(plugins)).check()


def encode_part(config: Config, plugins: Plugins, part: Part, say: Callable[[str], object]) -> EncodedPart:
    """Scan the data of a configuration, and encode a part of them that is not in its caches, on one device.

    `say` gets notices about the data. Raises what `check` raises.
    """
    check(config, plugins)
    phases, alignment = Phases(), find_family(config, plugins).alignment
    with TemporaryDirectory(prefix="smalti-encode-") as folder:
        data = scan_data(config, plugins, alignment, Path(folder), scan_progress(phases))
        for notice in data.notices:
            say(notice)
        encoder = PartEncoder(config, plugins, data, phases)
        texts, images = (encoder.encode(part, kind) for kind in KINDS)
    return texts + images
