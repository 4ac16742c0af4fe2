"""What was encoded before training, and what encodes it: the cache of a plugin (`CacheEntry.encoder`).

Shapes: B texts, latents (C, h, w).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor

from smalti.config import Config, DataOptions, package_of
from smalti.data.buckets import Bucket
from smalti.data.datasets.spec import catalog_of
from smalti.data.images import Bytes, crop, mirrored, read_image
from smalti.data.prepared import PreparedData
from smalti.diffusion import Conditioning
from smalti.errors import MissingPlugin
from smalti.hookspecs import HookSpecs
from smalti.models import ModelFamily
from smalti.parallel import Communicator
from smalti.plugins import Plugins, create
from smalti.rundir import Phases
from smalti.system import derive_seed, uniform
from smalti.types import CacheEntry

CropOffset = tuple[int, int]
"""Left and top of a crop, in pixels of the scaled image."""


class CachedLatents(Protocol):
    """The latents of all images, by sample. All methods may be called from several threads."""

    broken: frozenset[int]
    """Samples without latents, because their images cannot be read."""

    def get(self, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Tensor, CropOffset]:
        """The latents of an image that is not broken, on the CPU, and the offset of its crop.

        Raises UserError if they cannot be read.
        """
        ...

    def get_many(self, images: Sequence[tuple[int, bool]], bucket: Bucket) -> list[tuple[Tensor, CropOffset]]:
        """Like `get` for several images of a bucket, each with whether it is flipped."""
        ...


class CachedTexts(Protocol):
    """The conditioning of all texts of a run: captions, prompts and negative prompts of periodic work, the empty prompt."""

    def rows(self, texts: Sequence[str | None], *, negative: bool = False) -> Conditioning:
        """Conditioning with a leading dimension of len(texts), on the CPU, as `encode_captions` returns it.

        With `negative`, as `encode_negative_prompts` does, with None for no negative prompt. Raises UserError if it cannot
        be read.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Cached latents and texts; None for what is encoded in every step."""

    latents: CachedLatents | None = None
    texts: CachedTexts | None = None
    held_out: CachedLatents | None = None
    """Latents of the held-out images, if there are any."""

    def conditioning(
        self, texts: Sequence[str | None], device: str, *, negative: bool = False, on_host: Collection[str] = ()
    ) -> Conditioning | None:
        """Returns the conditioning of these captions, on the device; None if texts are encoded in every step.

        With `negative`, they are negative prompts, or None for none. What is named in `on_host` stays in host memory.
        """
        if self.texts is None:
            return None
        found = self.texts.rows(texts, negative=negative)
        return {name: rows if name in on_host else rows.to(device) for name, rows in found.items()}


class DataEncoder(Protocol):
    """Encodes images and captions before training, those for which `DataOptions` does not disable it."""

    def check(self) -> None:
        """Called in the launcher, before anything is launched. Raises UserError if what is encoded could not be kept.

        Writes nothing.
        """
        ...

    def encode(
        self,
        data: PreparedData,
        communicator: Communicator,
        directory: Path,
        phases: Phases,
        texts: Sequence[str],
        negative_texts: Sequence[str],
    ) -> Encoded:
        """Encode all images and captions of `data`, and further captions and negative prompts, then release the encoders.

        *Collective*.

        Called before the model is built: encoders and model need not fit into memory together. `directory` is for lists of
        broken images. Raises PreflightError on all ranks if one of them fails.
        """
        ...


def encoding_cache(config: Config, plugins: Plugins, family: ModelFamily) -> CacheEntry | None:
    """The cache in which a run keeps what it encodes ahead; None if it encodes everything in every step.

    Raises MissingPlugin if no plugin has such a cache.
    """
    options = config[DataOptions]
    if not family.cacheable or (options.vae_cache_disable and options.text_cache_disable):
        return None
    for entry in plugins.gather(HookSpecs.register_caches):
        if entry.encoder:
            return entry
    package = package_of("caches", "encodings")
    assert package is not None, "it is in the table of packages"
    message = f"{family.name} encodes images and captions before training, which needs {package.distribution}"
    raise MissingPlugin(message, fix=f"{package.fix}; or encode in every step: --vae_cache_disable --text_cache_disable")


def find_encoder(config: Config, plugins: Plugins, family: ModelFamily) -> DataEncoder | None:
    """What encodes ahead for a run; None if it encodes everything in every step. Raises what `encoding_cache` raises."""
    entry = encoding_cache(config, plugins, family)
    return None if entry is None else cast(DataEncoder, create(entry, entry.encoder, config, family, catalog_of(plugins)))


def encode_ahead(
    config: Config,
    plugins: Plugins,
    family: ModelFamily,
    data: PreparedData,
    communicator: Communicator,
    directory: Path,
    phases: Phases,
    texts: Sequence[str],
    negative_texts: Sequence[str],
) -> Encoded:
    """`DataEncoder.encode`, for a run that encodes ahead. *Collective*."""
    encoder = find_encoder(config, plugins, family)
    return Encoded() if encoder is None else encoder.encode(data, communicator, directory, phases, texts, negative_texts)


def fixed_crop(data: PreparedData, sample: int, bucket: Bucket, *, flipped: bool = False) -> tuple[Bytes, CropOffset]:
    """Returns an image cropped to its bucket, and the offset; a random crop is always the same. Raises BadSampleError.

    With `flipped` it is the same part of the image, mirrored.
    """
    found = data.sample(sample)
    image = read_image(found, bucket)
    place = found.dataset.spec.id, found.key
    fractions = uniform(derive_seed("across", *place)), uniform(derive_seed("down", *place))
    offset = found.crop_settings.offset((image.shape[2], image.shape[1]), bucket, fractions)
    return mirrored(image, bucket, offset) if flipped else (crop(image, bucket, offset), offset)
