"""The samples of a run's datasets, in buckets and in order.

Rank 0 (or the launcher) calls `build_datasets`; after a barrier the other ranks call `load_datasets`. Then every rank calls
`prepare`, which needs no communication: the same indexes give the same order.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any, Literal

from smalti.data.batch_check import BatchShape, BucketCount, Share
from smalti.data.buckets import ASPECT_DECIMALS, Bucket, CropSettings
from smalti.data.dataset import Dataset, Sample
from smalti.data.datasets.captions import NO_TEXT_FILE
from smalti.data.datasets.spec import Catalog, DatasetSpec
from smalti.data.order import BucketSamples, Order, Part, Passes
from smalti.data.plan.bucket_rows import BucketRows, rows_by_bucket
from smalti.data.plan.scheduled_order import ScheduledOrder, Span
from smalti.data.plan.short_buckets import ShortBuckets, handle_short_buckets
from smalti.data.scan.build import MakeRows, Progress, build_index, make_rows
from smalti.data.scan.identity import Identity, Settings
from smalti.data.scan.index import DatasetIndex, load_index
from smalti.data.scan.overlap import overlap
from smalti.data.scan.quarantine import ErrorBudget, Quarantined, allowed_errors, write_quarantine
from smalti.errors import PreflightError
from smalti.system import link_or_copy

Kind = Literal["image", "eval"]
_SHOWN = 5  # reasons in a message; the rest is in the quarantine file


@dataclass(frozen=True, kw_only=True)
class DataRules:
    """What the options and the model family set for all datasets.

    `alignment` is that of buckets, in pixels. `error_budget` is a share of all samples when it is below 1, else a count.
    `passes` is the order in each pass of a bucket; None permutes all samples.
    """

    seed: int
    shape: BatchShape
    alignment: int = 64
    error_budget: float = 0.01
    short_buckets: ShortBuckets = "merge"
    passes: Passes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedData:
    """The samples of a run, in order.

    A sample's number is its row, counted through all datasets in order of their ids; `sample` is the inverse. `counts` is the
    contents of each bucket, `notices` are messages for the user.
    """

    order: Order
    datasets: tuple[Dataset, ...]
    crop_settings: tuple[CropSettings, ...]
    counts: tuple[BucketCount, ...]
    notices: tuple[str, ...]
    unusable: int
    """How many samples the scan found unusable."""
    allowed_errors: int
    offsets: tuple[int, ...]
    short_buckets: Mapping[str, ShortBuckets] = field(default_factory=dict)
    """The datasets of which samples were moved to other buckets or left out, and why."""
    held_out: PreparedData | None = None
    """The held-out images, for evaluation, if there are any; their order has no meaning."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the position of a sample's dataset in `datasets`, and its row there."""
        dataset = bisect_right(self.offsets, sample) - 1
        return dataset, sample - self.offsets[dataset]

    def sample(self, number: int) -> Sample:
        """Returns the sample of this number."""
        dataset, row = self.locate(number)
        return Sample(number, self.datasets[dataset], self.crop_settings[dataset], row)

    def error_budget(self, log: Path | None = None) -> ErrorBudget:
        """Returns a new budget for one rank, which already counts what the scan found. `log` is this rank's JSON-lines file."""
        return ErrorBudget(allowed=self.allowed_errors, already=self.unusable, log=log)

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The unusable samples, each with the reason. Reads all indexes that have some."""
        return tuple(item for dataset in self.datasets for item in dataset.index.quarantined)

    @property
    def samples_per_epoch(self) -> int:
        """Repeats and probabilities counted."""
        return int(sum(content.per_epoch for content in self.order.buckets))

    @property
    def indexes(self) -> tuple[DatasetIndex, ...]:
        return tuple(dataset.index for dataset in self.datasets)

    @cached_property
    def identity(self) -> Identity:
        """Digests of the data. Computed once, since the data do not change during a run; reads no samples."""
        return Identity.of(self.indexes, self.order, self.settings)

    @property
    def settings(self) -> Settings:
        """The settings of each dataset that determine order and crops."""
        settings = {one.spec.id: _settings(one.spec, crop) for one, crop in zip(self.datasets, self.crop_settings, strict=True)}
        handled = {name: {"short_buckets": value} for name, value in self.short_buckets.items()}
        of_all = {} if self.order.passes is None else self.order.passes.settings
        return {name: {**one, **handled.get(name, {}), **of_all} for name, one in settings.items()}


def build_datasets(
    specs: Sequence[DatasetSpec],
    catalog: Catalog,
    directory: Path | None = None,
    progress: Callable[[str], Progress] | None = None,
    *,
    kind: Kind = "image",
    make_rows: MakeRows = make_rows,
) -> tuple[Dataset, ...]:
    """Scan the datasets of one kind. Call it in one process, before `load_datasets` in the others.

    Args:
        specs: from `parse_datasets`; entries of other kinds are skipped.
        catalog: the registered storages and metadata backends.
        directory: where indexes and quarantine lists are kept, the run directory's `data`; None keeps nothing.
        progress: called with the id of a dataset before it is scanned; returns the progress callback of the scan.
        kind: "image" for training, "eval" for held-out images.
        make_rows: may have other processes open files.
    """
    datasets: list[Dataset] = []
    for spec in _of_kind(specs, kind):
        cache = directory / f"{spec.file_name}.arrow" if directory else None
        same = next((other for other in datasets if spec.entry and other.spec.entry == spec.entry), None)
        if same is not None:
            if directory and cache:
                link_or_copy(directory / f"{same.spec.file_name}.arrow", cache)
            datasets.append(replace(same, spec=spec, index=same.index.named(spec.id), skipped_files={}, source_notices=()))
            continue
        storage = catalog.open_storage(spec)
        source = catalog.open_source(spec, storage)
        if directory:
            source.use_folder(directory / "sources" / spec.file_name)
        columns = catalog.open_columns(spec, specs)
        report = progress(spec.id) if progress else None
        index = build_index(spec, storage, source, cache, report, make_rows, columns.values())
        if directory:
            write_quarantine(directory / f"{spec.file_name}.quarantine.jsonl", index.quarantined)
        notices = [*source.notices]
        for column in columns.values():
            names = [field.name for field in column.fields]
            notices += column.check(batch.columns for batch in index.batches(*names)) if names else ()
        one = Dataset(spec=spec, storage=storage, source=source, index=index, columns=columns)
        datasets.append(replace(one, skipped_files=dict(source.skipped_files), source_notices=tuple(notices)))
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
        columns = catalog.open_columns(spec, specs)
        datasets.append(Dataset(spec=spec, storage=storage, source=source, index=index, columns=columns))
    return tuple(datasets)


def prepare(
    datasets: Sequence[Dataset], rules: DataRules, *, notices: Sequence[str] = (), directory: Path | None = None
) -> PreparedData:
    """Sort all samples into buckets, check the buckets, and compute the order. `notices` are put before those found here.

    `directory` keeps which rows are in which bucket, beside the indexes; with None that is 4 bytes of memory per sample. Raises
    PreflightError when a bucket cannot fill a batch and `short_buckets` does not help, when no sample remains, or when more
    samples are unusable than the error budget allows.
    """
    datasets = tuple(sorted(datasets, key=lambda dataset: dataset.spec.id))
    offsets = (0, *accumulate(len(dataset.index) for dataset in datasets))[:-1]
    crop_settings = tuple(crop_settings_of(dataset.spec, rules) for dataset in datasets)
    unusable = sum(dataset.index.unusable for dataset in datasets)
    allowed = allowed_errors(rules.error_budget, sum(len(dataset.index) for dataset in datasets))
    if unusable > allowed:
        _check_captions_exist(datasets)
        message = f"{unusable} samples cannot be used, and the error budget allows {allowed}: {_reasons(datasets)}"
        raise PreflightError(message, fix="fix or remove these files, or raise --data_error_budget")

    messages = [*notices, *(notice for dataset in datasets for notice in dataset.notices)]
    if unusable:
        messages.append(f"{unusable} samples are unusable (the error budget allows {allowed}): {_reasons(datasets)}")
    parts: list[_BucketPart] = []
    for number, (dataset, settings) in enumerate(zip(datasets, crop_settings, strict=True)):
        path = directory / f"{dataset.spec.file_name}.rows" if directory else None
        found = rows_by_bucket(dataset.index, settings, path)
        if found.left_out:
            limits = f"images are skipped, because they are {_limits(dataset.spec)}"
            messages.append(f"dataset {dataset.spec.id}: {found.left_out} of {len(dataset.index)} {limits}")
        parts += [_BucketPart(dataset=dataset.spec, number=number, found=one, bucket=one.bucket) for one in found.buckets]
    if not parts:
        _check_captions_exist(datasets)
        raise PreflightError("no dataset has an image that can be trained on", fix="lower minimum_image_size, or add images")

    weights = _weights([dataset.spec for dataset in datasets])
    resolutions = {dataset.spec.id: _resolution(one) for dataset, one in zip(datasets, crop_settings, strict=True)}
    handled = handle_short_buckets(_counts(parts), rules.shape, rules.short_buckets, resolutions)
    parts = [
        part if bucket == part.bucket else replace(part, bucket=bucket)
        for part in parts
        if (bucket := handled.bucket(part.dataset.id, part.bucket)) is not None
    ]
    buckets = [
        BucketSamples(
            bucket=bucket, parts=tuple(part.content(handled.raised.get(bucket, 0), offsets, weights) for part in group)
        )
        for bucket, group in _grouped(parts).items()
    ]
    order = _order(buckets, [dataset.spec for dataset in datasets], rules)
    return PreparedData(
        order=order,
        datasets=datasets,
        crop_settings=crop_settings,
        counts=_counts(parts),
        notices=(*messages, *handled.notices, *_left_out(order)),
        unusable=unusable,
        allowed_errors=allowed,
        offsets=offsets,
        short_buckets=dict.fromkeys(handled.datasets, rules.short_buckets),
    )


def _order(buckets: Sequence[BucketSamples], specs: Sequence[DatasetSpec], rules: DataRules) -> Order:
    spans = [_span(spec) for spec in specs]
    settings: dict[str, Any] = {"seed": rules.seed, "effective_batch": rules.shape.effective, "passes": rules.passes}
    if all(span == Span() for span in spans):
        return Order(buckets, **settings)
    return ScheduledOrder(buckets, spans=spans, **settings)


def _span(spec: DatasetSpec) -> Span:
    """When a dataset is trained on; held-out images are always used."""
    if spec.dataset_type != "image":
        return Span()
    starts = {name: value for name in ("start_step", "start_epoch") if (value := getattr(spec, name) or 0) > 1}
    return Span(**starts, end_step=spec.end_step or None, end_epoch=spec.end_epoch or None)


def _left_out(order: Order) -> Iterator[str]:
    """Notices about buckets that fill a batch only while other datasets are trained on too."""
    for phase in order.phases if isinstance(order, ScheduledOrder) else ():
        if phase.left_out:
            names = ", ".join(f"{one.bucket} ({len(one)} samples)" for one in phase.left_out)
            what = f"buckets are left out that do not fill a batch of {order.effective_batch}"
            yield f"from step {phase.start.position + 1} on {what}: {names}"


def check_no_overlap(training: Sequence[Dataset], held_out: Sequence[Dataset]) -> None:
    """Raises PreflightError if a held-out image is also in a training dataset."""
    for dataset, other in product(training, held_out):
        mine, its = _root(dataset), _root(other)
        if its.startswith(mine):
            found = overlap(dataset.index, other.index, its[len(mine) :])
        elif mine.startswith(its):
            found = overlap(other.index, dataset.index, mine[len(its) :])
        else:
            continue
        if found.count:
            raise PreflightError(
                f"{found.count} images of the eval datasets are also in the training dataset {dataset.spec.id}: {found.first}",
                fix="put the eval images in a separate folder, outside of the training datasets",
            )


def _root(dataset: Dataset) -> str:
    """The place of a dataset's images: that of an image is this and its key."""
    spec = dataset.spec
    if spec.type == "local" and spec.instance_data_dir is not None:
        return os.path.join(os.path.realpath(spec.instance_data_dir), "")  # noqa: PTH118 - ends in a slash
    return f"{spec.type} {spec.instance_data_dir} {sorted(spec.storage_options.items())}\0"


def crop_settings_of(spec: DatasetSpec, rules: DataRules) -> CropSettings:
    """The crop settings of a dataset: keys of its entry, and what the options and the model family set for all."""
    keys = {each.name: getattr(spec, each.name) for each in fields(CropSettings) if each.name in DatasetSpec.model_fields}
    return CropSettings(alignment=rules.alignment, **keys)


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
    always = {"resolution", "resolution_type", "crop", "minimum_image_size", "repeats"}
    always |= {"crop_aspect", "crop_style"} if spec.crop else set()
    values = spec.model_dump(mode="json", include=always | _LATER_SETTINGS)
    return {
        "aspect_bucket_alignment": crop_settings.alignment,
        "aspect_bucket_rounding": ASPECT_DECIMALS,
        **({"probability": spec.probability} if spec.probability != 1 else {}),
        **{name: value for name, value in values.items() if name in always or value},
    }


_LATER_SETTINGS = {
    *("maximum_image_size", "target_downsample_size", "minimum_aspect_ratio", "maximum_aspect_ratio"),
    *("caption_weights", "caption_prefix", "caption_suffix", "trigger_word", "caption_shuffle", "caption_tag_dropout_rate"),
    *("caption_dropout_probability", "caption_filter_list", "crop_aspect_buckets", "max_upscale_threshold"),
    *("flip_probability", "start_epoch", "start_step", "end_epoch", "end_step"),
}
"""Settings that are recorded only where they are set, since checkpoints of earlier versions do not have them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _BucketPart:
    """Samples of one dataset, `number` among all, that have one size; `bucket` is where they are trained."""

    dataset: DatasetSpec
    number: int
    found: BucketRows
    bucket: Bucket

    def content(self, raised: int, offsets: Sequence[int], weights: Sequence[Fraction]) -> Part:
        """With `raised` repeats, unless the user has set them."""
        repeats, weight = (self.dataset.repeats or raised) + 1, weights[self.number]
        copies = repeats if weight == 1 else repeats * weight  # arithmetic with fractions is slow
        offset = offsets[self.number]
        return Part(dataset=self.number, rows=self.found.rows, copies=copies, offset=offset, digest=self.found.digest)


def _weights(specs: Sequence[DatasetSpec]) -> list[Fraction]:
    """How often the images of each dataset are seen, in proportion to those of the one with the highest probability."""
    highest = max(Fraction(str(spec.probability)) for spec in specs)
    return [(Fraction(str(spec.probability)) / highest).limit_denominator(1000) for spec in specs]


def _grouped(parts: Iterable[_BucketPart]) -> dict[Bucket, list[_BucketPart]]:
    """By bucket; then by dataset, and the samples of the bucket's own size first."""
    groups: dict[Bucket, list[_BucketPart]] = {}
    for part in sorted(parts, key=lambda one: (one.bucket, one.number, one.found.bucket != one.bucket, one.found.bucket)):
        groups.setdefault(part.bucket, []).append(part)
    return groups


def _counts(parts: Iterable[_BucketPart]) -> tuple[BucketCount, ...]:
    """The contents of each bucket, with one share for each dataset."""
    counts = []
    for bucket, group in _grouped(parts).items():
        samples: dict[str, int] = {}
        for part in group:
            samples[part.dataset.id] = samples.get(part.dataset.id, 0) + len(part.found.rows)
        repeats = {part.dataset.id: part.dataset.repeats for part in group}
        shares = tuple(Share(dataset=name, samples=samples[name], repeats=repeats[name]) for name in samples)
        counts.append(BucketCount(bucket=bucket, shares=shares))
    return tuple(counts)


def _resolution(settings: CropSettings) -> Hashable:
    """What datasets have in common that may share a bucket of another aspect ratio."""
    square = settings.crop and settings.crop_aspect == "square"
    return settings.resolution, settings.resolution_type, settings.alignment, square, settings.crop_aspect_buckets


def _of_kind(specs: Iterable[DatasetSpec], kind: Kind) -> list[DatasetSpec]:
    return [spec for spec in specs if spec.dataset_type == kind]


def _check_captions_exist(datasets: Iterable[Dataset]) -> None:
    """Raises PreflightError for a dataset without a single text file: another caption strategy was meant."""
    for dataset in datasets:
        unusable = dataset.index.unusable == len(dataset.index)
        if unusable and all(item.reason.startswith(NO_TEXT_FILE) for item in dataset.index.quarantined):
            raise PreflightError(
                f"No captions found: none of the {len(dataset.index)} images in {dataset.storage.location} has a text file.",
                fix="add NAME.txt beside each image, or use --caption_strategy=filename, or --caption_strategy=instanceprompt"
                f" with --instance_prompt=TEXT{''.join(f'; {notice}' for notice in dataset.spec.notices)}",
            )


def _reasons(datasets: Iterable[Dataset]) -> str:
    """The first unusable samples, each with the reason."""
    unusable = sum(dataset.index.unusable for dataset in datasets)
    shown = list(islice(chain.from_iterable(dataset.index.unusable_rows() for dataset in datasets), _SHOWN))
    lines = [f"\n    {item.dataset}: {item.key}: {item.reason}" for item in shown]
    more = unusable - len(lines)
    return "".join(lines) + (f"\n    and {more} more" if more else "")
