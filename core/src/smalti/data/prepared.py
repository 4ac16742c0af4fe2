"""The samples of a run's datasets, in buckets and in order.

Rank 0 (or the launcher) calls `build_datasets`; after a barrier the other ranks call `load_datasets`. Then every rank calls
`prepare`, which needs no communication: the same indexes give the same order.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smalti.data.batch_check import BatchShape, BucketCount, Share, check_batches, describe_raised
from smalti.data.buckets import Bucket, CropSettings, choices_of
from smalti.data.datasets.caption_policy import CaptionPolicy
from smalti.data.datasets.captions import NO_TEXT_FILE
from smalti.data.datasets.catalog import Catalog
from smalti.data.datasets.kohya_folders import numbered, unread_names_notice
from smalti.data.datasets.sources import ReadsPlaces, ReportsNotices, ReportsSkipped, UsesFolder, describe_skipped
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.order import BucketSamples, Order, Part
from smalti.data.scan.build import Progress, build_index
from smalti.data.scan.identity import Identity
from smalti.data.scan.index import DatasetIndex, load_index
from smalti.data.scan.quarantine import ErrorBudget, Quarantined, allowed_errors, write_quarantine
from smalti.data.storage.protocol import Storage
from smalti.errors import PreflightError

Kind = Literal["image", "eval"]
_SHOWN = 5  # reasons in a message; the rest is in the quarantine file


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset: its entry, its storage and its index."""

    spec: DatasetSpec
    storage: Storage
    index: DatasetIndex
    skipped_files: Mapping[str, int] = field(default_factory=dict)
    """Numbers of files that are not samples, by extension; only set by a scan."""
    source_notices: tuple[str, ...] = ()
    """About the names of its folders, and what its source reports; only set by a scan."""
    places: ReadsPlaces | None = None
    """Reads samples that are parts of other files, if there are such."""

    def read(self, row: int) -> bytes:
        """The file of an image. Raises a StorageError, or BadSampleError for an image in a damaged archive."""
        place = self.index.place(row)
        if not place:
            return self.storage.read(self.index.key(row))
        assert self.places is not None, (
            f"{self.index.key(row)} is at {place}, but the source of {self.spec.id} does not read places"
        )
        return self.places.read(place)

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


@dataclass(frozen=True, kw_only=True)
class DataRules:
    """What the options and the model family set for all datasets.

    `alignment` and `aspect_rounding` shape the buckets. `error_budget` is a share of all samples when it is below 1, else a
    count.
    """

    seed: int
    shape: BatchShape
    alignment: int = 64
    aspect_rounding: int = 2
    error_budget: float = 0.01
    allow_oversubscription: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedData:
    """The samples of a run, in order.

    A sample's number is its row, counted through all datasets in order of their ids; `locate` is the inverse. `counts` is the
    contents of each bucket, `notices` are messages for the user.
    """

    order: Order
    datasets: tuple[Dataset, ...]
    crop_settings: tuple[CropSettings, ...]
    counts: tuple[BucketCount, ...]
    notices: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    allowed_errors: int
    offsets: tuple[int, ...]
    held_out: PreparedData | None = None
    """The held-out images, for evaluation, if there are any; their order has no meaning."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the position of a sample's dataset in `datasets`, and its row there."""
        dataset = bisect_right(self.offsets, sample) - 1
        return dataset, sample - self.offsets[dataset]

    def error_budget(self, log: Path | None = None) -> ErrorBudget:
        """Returns a new budget for one rank, which already counts what the scan found. `log` is this rank's JSON-lines file."""
        return ErrorBudget(allowed=self.allowed_errors, already=len(self.quarantined), log=log)

    @property
    def indexes(self) -> tuple[DatasetIndex, ...]:
        return tuple(dataset.index for dataset in self.datasets)

    @cached_property
    def identity(self) -> Identity:
        """Digests of the data. Computed once, since the data do not change during a run; reads all keys."""
        pairs = zip(self.datasets, self.crop_settings, strict=True)
        settings = {dataset.spec.id: _settings(dataset.spec, crop_settings) for dataset, crop_settings in pairs}
        return Identity.of(self.indexes, self.order, settings)


def build_datasets(
    specs: Sequence[DatasetSpec],
    catalog: Catalog,
    directory: Path | None = None,
    progress: Callable[[str], Progress] | None = None,
    *,
    kind: Kind = "image",
) -> tuple[Dataset, ...]:
    """Scan the datasets of one kind. Call it in one process, before `load_datasets` in the others.

    Args:
        specs: from `parse_datasets`; entries of other kinds are skipped.
        catalog: the registered storages and metadata backends.
        directory: where indexes and quarantine lists are kept, the run directory's `data`; None keeps nothing.
        progress: called with the id of a dataset before it is scanned; returns the progress callback of the scan.
        kind: "image" for training, "eval" for held-out images.
    """
    datasets = []
    for spec in _of_kind(specs, kind):
        storage = catalog.open_storage(spec)
        cache = directory / f"{spec.file_name}.arrow" if directory else None
        source = catalog.open_source(spec, storage)
        if directory and isinstance(source, UsesFolder):
            source.use_folder(directory / "sources" / spec.file_name)
        index = build_index(spec, storage, source, cache, progress(spec.id) if progress else None)
        if directory:
            write_quarantine(directory / f"{spec.file_name}.quarantine.jsonl", index.quarantined)
        skipped_files = dict(source.skipped_files) if isinstance(source, ReportsSkipped) else {}
        notices = (*unread_names_notice(spec), *(source.notices if isinstance(source, ReportsNotices) else ()))
        places = source if isinstance(source, ReadsPlaces) else None
        datasets.append(
            Dataset(
                spec=spec,
                storage=storage,
                index=index,
                skipped_files=skipped_files,
                source_notices=notices,
                places=places,
            )
        )
    return tuple(datasets)


def load_datasets(
    specs: Sequence[DatasetSpec], catalog: Catalog, directory: Path, *, kind: Kind = "image"
) -> tuple[Dataset, ...]:
    """Load the datasets of one kind from the indexes that another process has built."""
    datasets = []
    for spec in _of_kind(specs, kind):
        storage = catalog.open_storage(spec)
        source = catalog.open_source(spec, storage)
        index = load_index(spec, directory / f"{spec.file_name}.arrow")
        places = source if isinstance(source, ReadsPlaces) else None
        datasets.append(Dataset(spec=spec, storage=storage, index=index, places=places))
    return tuple(datasets)


def prepare(datasets: Sequence[Dataset], rules: DataRules, *, notices: Sequence[str] = ()) -> PreparedData:
    """Sort all samples into buckets, check the buckets, and compute the order. `notices` are put before those found here.

    Raises PreflightError when a bucket cannot fill a batch, when no sample remains, or when more samples are unusable than the
    error budget allows.
    """
    datasets = tuple(sorted(datasets, key=lambda dataset: dataset.spec.id))
    offsets = (0, *accumulate(len(dataset.index) for dataset in datasets))[:-1]
    crop_settings = tuple(crop_settings_of(dataset.spec, rules) for dataset in datasets)
    quarantined = tuple(item for dataset in datasets for item in dataset.index.quarantined)
    allowed = allowed_errors(rules.error_budget, sum(len(dataset.index) for dataset in datasets))
    if len(quarantined) > allowed:
        _check_captions_exist(datasets)
        raise PreflightError(_over_budget(quarantined, allowed), fix="fix or remove these files, or raise --data_error_budget")

    messages = [*notices, *(notice for dataset in datasets for notice in dataset.notices)]
    if quarantined:
        messages.append(f"{len(quarantined)} samples are unusable (the error budget allows {allowed}): {_reasons(quarantined)}")
    contents: dict[Bucket, list[_BucketPart]] = {}
    for number, (dataset, settings, offset) in enumerate(zip(datasets, crop_settings, offsets, strict=True)):
        by_bucket, small = _rows_by_bucket(dataset.index, settings)
        if small:
            total = len(dataset.index)
            messages.append(
                f"dataset {dataset.spec.id}: {small} of {total} images are skipped, because they are {_limits(dataset.spec)}"
            )
        for bucket, rows in by_bucket.items():
            content = _BucketPart(
                dataset=dataset.spec.id, number=number, rows=rows, offset=offset, repeats=dataset.spec.repeats
            )
            contents.setdefault(bucket, []).append(content)
    if not contents:
        _check_captions_exist(datasets)
        raise PreflightError("no dataset has an image that can be trained on", fix="lower minimum_image_size, or add images")

    counts = tuple(
        BucketCount(bucket=bucket, shares=tuple(content.share for content in contents[bucket])) for bucket in sorted(contents)
    )
    raised = check_batches(counts, rules.shape, allow_oversubscription=rules.allow_oversubscription)
    messages += describe_raised(counts, raised, rules.shape)
    buckets = [_bucket_samples(bucket, parts, raised.get(bucket, 0)) for bucket, parts in contents.items()]
    return PreparedData(
        order=Order(buckets, seed=rules.seed, effective_batch=rules.shape.effective),
        datasets=datasets,
        crop_settings=crop_settings,
        counts=counts,
        notices=tuple(messages),
        quarantined=quarantined,
        allowed_errors=allowed,
        offsets=offsets,
    )


def check_no_overlap(training: Sequence[Dataset], held_out: Sequence[Dataset]) -> None:
    """Raises PreflightError if a held-out image is also in a training dataset."""
    names = {place for dataset in held_out for place in _image_ids(dataset)}
    for dataset in training:
        both = [place[-1] for place in _image_ids(dataset) if place in names]
        if both:
            raise PreflightError(
                f"{len(both)} images of the eval datasets are also in the training dataset {dataset.spec.id}: {both[0]}",
                fix="put the eval images in a separate folder, outside of the training datasets",
            )


def _image_ids(dataset: Dataset) -> Iterator[tuple[str, ...]]:
    """Identifies each image of a dataset, across datasets."""
    spec = dataset.spec
    if spec.type == "local" and spec.instance_data_dir is not None:
        root = os.path.realpath(spec.instance_data_dir)
        yield from ((os.path.join(root, key),) for key in dataset.index.keys())  # noqa: PTH118, SIM118 - once per image
    else:
        root = f"{spec.type} {spec.instance_data_dir} {sorted(spec.storage_options.items())}"
        yield from ((root, key) for key in dataset.index.keys())  # noqa: SIM118


def crop_settings_of(spec: DatasetSpec, rules: DataRules) -> CropSettings:
    """The crop settings of a dataset."""
    return CropSettings(
        resolution=spec.resolution,
        resolution_type=spec.resolution_type,
        alignment=rules.alignment,
        aspect_rounding=rules.aspect_rounding,
        crop=spec.crop,
        crop_aspect=spec.crop_aspect,
        aspects=spec.crop_aspect_buckets,
        maximum_upscale=spec.max_upscale_threshold,
        crop_style=spec.crop_style,
        minimum_size=spec.minimum_image_size,
        maximum_size=spec.maximum_image_size,
        downsample_size=spec.target_downsample_size,
        minimum_aspect=spec.minimum_aspect_ratio,
        maximum_aspect=spec.maximum_aspect_ratio,
    )


def _limits(spec: DatasetSpec) -> str:
    """What images are not that `CropSettings.accepts` refuses."""
    reasons = ["smaller than minimum_image_size"] if spec.minimum_image_size else []
    if spec.max_upscale_threshold is not None:
        reasons.append("to be enlarged by more than max_upscale_threshold")
    if spec.minimum_aspect_ratio or spec.maximum_aspect_ratio:
        reasons.append("of an aspect ratio outside of minimum_aspect_ratio and maximum_aspect_ratio")
    return " or ".join(reasons)


def _settings(spec: DatasetSpec, crop_settings: CropSettings) -> dict[str, object]:
    """The settings that determine order and crops of a dataset's images, under the names of the options."""
    return {
        "resolution": crop_settings.resolution,
        "resolution_type": crop_settings.resolution_type,
        "aspect_bucket_alignment": crop_settings.alignment,
        "aspect_bucket_rounding": crop_settings.aspect_rounding,
        "crop": crop_settings.crop,
        **({"crop_aspect": crop_settings.crop_aspect, "crop_style": crop_settings.crop_style} if crop_settings.crop else {}),
        "minimum_image_size": crop_settings.minimum_size,
        "repeats": spec.repeats,
        **{name: value for name, value in spec.model_dump(mode="json", include=_LATER_SETTINGS).items() if value},
    }


_LATER_SETTINGS = {
    *("maximum_image_size", "target_downsample_size", "minimum_aspect_ratio", "maximum_aspect_ratio"),
    *("caption_weights", "caption_prefix", "caption_suffix", "trigger_word", "caption_shuffle", "caption_tag_dropout_rate"),
    *("caption_dropout_probability", "caption_filter_list", "crop_aspect_buckets", "max_upscale_threshold"),
    "flip_probability",
}
"""Settings that are recorded only where they are set, since checkpoints of earlier versions do not have them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _BucketPart:
    """One dataset's samples in a bucket. `repeats` is 0 if the user did not set it."""

    dataset: str
    number: int
    rows: NDArray[np.uint32]
    offset: int
    repeats: int

    @property
    def share(self) -> Share:
        return Share(dataset=self.dataset, samples=len(self.rows), repeats=self.repeats)


def _of_kind(specs: Iterable[DatasetSpec], kind: Kind) -> list[DatasetSpec]:
    return [spec for spec in specs if spec.dataset_type == kind]


def _rows_by_bucket(index: DatasetIndex, crop_settings: CropSettings) -> tuple[dict[Bucket, NDArray[np.uint32]], int]:
    """Returns the usable rows by bucket, ascending, and how many images are too small."""
    widths, heights = index.numbers("width"), index.numbers("height")
    rows = np.flatnonzero(widths > 0)
    sizes = widths[rows].astype(np.int64) << 32 | heights[rows]
    if crop_settings.choices > 1:
        sizes |= choices_of(index.numbers("size")[rows], widths[rows], heights[rows]) << 24
    # Images come in far fewer sizes than there are images, so the rule is applied once per size.
    distinct, which = np.unique(sizes, return_inverse=True)
    buckets = []
    for size in distinct.tolist():
        width, height, choice_number = size >> 32, size & 0xFFFFFF, size >> 24 & 0xFF
        buckets.append(crop_settings.bucket(width, height, choice_number) if crop_settings.accepts(width, height) else None)
    names = sorted({bucket for bucket in buckets if bucket is not None})
    numbers = {bucket: number for number, bucket in enumerate(names)}
    choice = np.array([-1 if bucket is None else numbers[bucket] for bucket in buckets], dtype=np.int64)[which]
    return {bucket: rows[choice == number].astype(np.uint32) for bucket, number in numbers.items()}, int((choice < 0).sum())


def _bucket_samples(bucket: Bucket, parts: Sequence[_BucketPart], raised: int) -> BucketSamples:
    return BucketSamples(
        bucket=bucket,
        parts=tuple(
            Part(dataset=part.number, rows=part.rows, copies=(part.repeats or raised) + 1, offset=part.offset) for part in parts
        ),
    )


def _check_captions_exist(datasets: Iterable[Dataset]) -> None:
    """Raises PreflightError for a dataset without a single text file: another caption strategy was meant."""
    for dataset in datasets:
        unusable = dataset.index.unusable == len(dataset.index)
        if unusable and all(item.reason.startswith(NO_TEXT_FILE) for item in dataset.index.quarantined):
            folder = Path(dataset.storage.location, dataset.index.key(0)).parent
            kohya = ", or --kohya_folders to use the names of the folders" if numbered(folder) else ""
            raise PreflightError(
                f"No captions found: none of the {len(dataset.index)} images in {dataset.storage.location} has a text file.",
                fix="add NAME.txt beside each image, or use --caption_strategy=filename, or --caption_strategy=instanceprompt"
                f" with --instance_prompt=TEXT{kohya}",
            )


def _over_budget(quarantined: Sequence[Quarantined], allowed: int) -> str:
    return f"{len(quarantined)} samples cannot be used, and the error budget allows {allowed}: {_reasons(quarantined)}"


def _reasons(quarantined: Sequence[Quarantined]) -> str:
    lines = [f"\n    {item.dataset}: {item.key}: {item.reason}" for item in quarantined[:_SHOWN]]
    more = len(quarantined) - len(lines)
    return "".join(lines) + (f"\n    and {more} more" if more else "")
