"""Where caches are: a local folder, or a prefix of another storage. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from smalti import Config, UserError
from smalti.config import DataOptions, RunOptions
from smalti.data import (
    Catalog,
    DatasetSpec,
    LocalStorage,
    Storage,
    dataset_specs,
    latents_entry,
    own_texts_entry,
    texts_entry,
)
from smalti_cache.options import CacheOptions
from smalti_cache.reads.local_copies import LocalCopies, open_local_copies


@dataclass(frozen=True, kw_only=True)
class CachePlace:
    """A local `folder`, or with `spec` (the entry of a cache) a prefix of its storage."""

    folder: Path | None = None
    spec: DatasetSpec | None = None
    prefix: str = ""

    @property
    def id(self) -> tuple[str, str, str]:
        """The same for entries that are the same place."""
        return str(self.folder or ""), self.spec.id if self.spec else "", self.prefix

    def open(self, name: str, catalog: Catalog) -> tuple[Storage, str]:
        """Returns a storage, and the prefix there of the store `name`. Creates the folder. Raises UserError."""
        if self.spec is not None:
            return catalog.open_storage(self.spec), f"{self.prefix}/{name}" if self.prefix else name
        assert self.folder is not None
        try:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot cache encoded images and texts in {self.folder / name}: {error.strerror or error}",
                fix="--cache_dir=FOLDER, or encode in every step with --vae_cache_disable --text_cache_disable",
            ) from error
        return LocalStorage(self.folder / name), ""


@dataclass(frozen=True, kw_only=True)
class CacheFolders:
    """Where caches are: of texts, and of the latents of each dataset, by its id.

    `own_texts` are the places of datasets whose texts have one of their own.
    """

    texts: CachePlace
    latents: Mapping[str, CachePlace]
    own_texts: Mapping[str, CachePlace] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog, compare=False, repr=False)
    index_folder: Path | None = field(default=None, compare=False)
    """A folder of this node for merged indexes of large caches; None for a folder below that of temporary files."""
    compress: bool = False
    copies: Path | None = field(default=None, compare=False)
    """A folder of this node for copies of what is read from remote storages; None keeps none."""
    copied_bytes: int = field(default=0, compare=False)
    """Size limit of these copies."""
    read_ahead: int = field(default=4 << 30, compare=False)
    """Bytes of latents in memory that were read before they are wanted."""

    @cached_property
    def local_copies(self) -> LocalCopies | None:
        """The copies in that folder, the same for all stores of this process."""
        return None if self.copies is None else open_local_copies(self.copies, self.copied_bytes)


def cache_folders(config: Config, catalog: Catalog) -> CacheFolders:
    """Returns where caches are, from the options and dataset entries; by default below the run directory."""
    options = config[CacheOptions]
    given = CachePlace(folder=_absolute(options.cache_dir or cast(Path, config[RunOptions].output_dir) / "cache"))
    specs = dataset_specs(config, catalog)
    entry = texts_entry(specs)
    own = {spec.id: each for spec in specs if spec.has_images and (each := own_texts_entry(spec, specs)) is not None}
    return CacheFolders(
        texts=given if entry is None else _place(entry, entry.cache_dir, given),
        own_texts={name: _place(each, each.cache_dir, given) for name, each in own.items()},
        latents={spec.id: _place(latents_entry(spec, specs), spec.cache_dir_vae, given) for spec in specs if spec.has_images},
        catalog=catalog,
        compress=options.compress_disk_cache,
        copies=options.cache_local_dir,
        copied_bytes=int(options.cache_local_gb * 1e9),
        read_ahead=int(options.data_order_gb * 1e9),
    )


def check_places(config: Config, folders: CacheFolders) -> None:
    """Raises StorageError if a remote storage in which the run caches latents or texts cannot be listed. Creates nothing."""
    options = config[DataOptions]
    places = [*(() if options.text_cache_disable else [folders.texts, *folders.own_texts.values()])]
    places += () if options.vae_cache_disable else folders.latents.values()
    for place in {place.id: place for place in places if place.spec is not None}.values():
        storage, name = place.open("", folders.catalog)
        next(iter(storage.list(name)), None)


def _place(entry: DatasetSpec | None, folder: str | None, given: CachePlace) -> CachePlace:
    """Returns where the cache of an entry is: `folder` is a local one, or the prefix in the storage of the entry."""
    if entry is not None and entry.type != "local":
        return CachePlace(spec=entry, prefix=(folder or "").strip("/"))
    return given if folder is None else CachePlace(folder=_absolute(folder))


def _absolute(folder: str | Path) -> Path:
    return Path(folder).expanduser().absolute()
