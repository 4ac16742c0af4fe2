"""Where caches are: a local folder, or a prefix of another storage. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from smalti_cache.reads.local_copies import LocalCopies, open_local_copies
from smalti.data.datasets.catalog import Catalog
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import Storage
from smalti.errors import UserError


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

    @cached_property
    def local_copies(self) -> LocalCopies | None:
        """The copies in that folder, the same for all stores of this process."""
        return None if self.copies is None else open_local_copies(self.copies, self.copied_bytes)
