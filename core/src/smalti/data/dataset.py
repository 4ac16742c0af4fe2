"""A dataset of a run with its index, and one sample of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from smalti.data.buckets import CropSettings
from smalti.data.datasets.caption_policy import CaptionPolicy
from smalti.data.datasets.columns import Column
from smalti.data.datasets.sources import MetadataSource, describe_skipped
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.index import DatasetIndex
from smalti.data.storage.protocol import Storage
from smalti.system import derive_seed, uniform


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset: its entry, its storage, its source and its index."""

    spec: DatasetSpec
    storage: Storage
    source: MetadataSource
    index: DatasetIndex
    skipped_files: Mapping[str, int] = field(default_factory=dict)
    """Numbers of files that are not samples, by extension; only set by a scan."""
    source_notices: tuple[str, ...] = ()
    """What its source reports; only set by a scan."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """What it has for batches beside images and captions, by name."""

    def read(self, row: int) -> bytes:
        """The file of an image. Raises a StorageError, or BadSampleError for an image in a damaged archive."""
        place = self.index.place(row)
        return self.source.read(place) if place else self.storage.read(self.index.key(row))

    @cached_property
    def caption_policy(self) -> CaptionPolicy:
        """What visits train on of the captions of its images."""
        return CaptionPolicy(spec=self.spec)

    def texts(self, row: int) -> tuple[str, ...]:
        """Returns every text that a visit of an image may pick where texts are encoded before training, each once."""
        return self.caption_policy.texts(self.index.captions(row))

    @property
    def flips(self) -> tuple[bool, ...]:
        """The variants of an image that visits take: as it is, mirrored, or both. Held-out images are never mirrored."""
        share = self.spec.flip_probability if self.spec.dataset_type == "image" else 0.0
        return (False,) if share == 0 else (True,) if share == 1 else (False, True)

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for the user about its entry and its files."""
        notices = (*self.spec.notices, *self.source_notices)
        if not self.skipped_files:
            return notices
        total, names = sum(self.skipped_files.values()), describe_skipped(self.skipped_files)
        return (*notices, f"dataset {self.spec.id}: {total} files are skipped, because smalti does not read them: {names}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a run: `row` of `dataset`, whose images are cropped by `crop_settings`.

    `number` counts through all datasets in order of their ids.
    """

    number: int
    dataset: Dataset
    crop_settings: CropSettings
    row: int

    @property
    def key(self) -> str:
        """Its name in the dataset."""
        return self.dataset.index.key(self.row)

    @property
    def name(self) -> str:
        """DATASET/KEY, as messages and batches name it."""
        return f"{self.dataset.spec.id}/{self.key}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the original image."""
        return self.dataset.index.size(self.row)

    @property
    def captions(self) -> tuple[str, ...]:
        """All that the scan found; `text` picks one."""
        return self.dataset.index.captions(self.row)

    def value(self, field: str) -> object:
        """What the index has in one of the `Column.fields`."""
        return self.dataset.index.value(field, self.row)

    def read(self) -> bytes:
        """`Dataset.read` of it."""
        return self.dataset.read(self.row)

    def text(self, seed: int, *, epoch: int, visit: int, cached: bool) -> str:
        """Returns the text of a visit. With `cached` texts it is one of `Dataset.texts`."""
        policy = self.dataset.caption_policy
        return policy.pick(self.captions, seed=seed, epoch=epoch, sample=self.number, visit=visit, cached=cached)

    def is_flipped(self, seed: int, visit: int) -> bool:
        """Whether a visit sees the image mirrored."""
        if len(self.dataset.flips) == 1:
            return self.dataset.flips[0]
        return uniform(derive_seed("flip", seed, visit)) < self.dataset.spec.flip_probability
