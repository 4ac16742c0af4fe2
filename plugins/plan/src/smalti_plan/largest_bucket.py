"""The largest bucket that a run can meet, as far as it is known before the data are scanned. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from smalti import ConfigError, UserError
from smalti.config import Config, DataOptions, RunOptions
from smalti.data import (
    Bucket,
    CropSettings,
    DatasetSpec,
    catalog_of,
    crop_settings_of,
    data_rules,
    dataset_specs,
    known_buckets,
    load_index,
)
from smalti.plugins import Plugins
from smalti.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class LargestBucket:
    """The bucket of most pixels, and in words where that is from."""

    bucket: Bucket
    source: str


def largest_bucket(config: Config, plugins: Plugins, alignment: int) -> LargestBucket:
    """From the index of a training dataset if the run directory has one, else from the buckets that the dataset lists.

    Of other datasets the square at their resolution counts. `alignment` is the default of the model family.
    """
    rules = data_rules(config, plugins, alignment)
    found = [
        _of_dataset(spec, crop_settings_of(spec, rules), _index(config, spec)) for spec in trained_datasets(config, plugins)
    ]
    options = config[DataOptions]
    if not found:
        alone = CropSettings(resolution=options.resolution, resolution_type=options.resolution_type, alignment=rules.alignment)
        return LargestBucket(bucket=alone.square, source="squares, as no dataset is configured")
    return max(found, key=lambda each: each.bucket.width * each.bucket.height)


def buckets_key(config: Config, plugins: Plugins) -> str:
    """Changes with the datasets and their indexes, and so whenever `largest_bucket` may."""
    found = []
    for spec in trained_datasets(config, plugins):
        path = _index(config, spec)
        status = path.stat() if path is not None and path.exists() else None
        scanned = None if status is None else [status.st_size, status.st_mtime_ns]
        found.append([spec.model_dump(mode="json"), scanned, _is_missing(spec)])
    return json.dumps(found, sort_keys=True, default=str)


def trained_datasets(config: Config, plugins: Plugins) -> list[DatasetSpec]:
    """Those with images to train on. None if their configuration has errors: a run reports them, and a plan needs no fix."""
    try:
        return [spec for spec in dataset_specs(config, catalog_of(plugins)) if spec.dataset_type == "image"]
    except ConfigError:
        return []


def _index(config: Config, spec: DatasetSpec) -> Path | None:
    output = config[RunOptions].output_dir
    return None if output is None else RunDirectory(output.expanduser().resolve()).data / f"{spec.file_name}.arrow"


def _of_dataset(spec: DatasetSpec, settings: CropSettings, index: Path | None) -> LargestBucket:
    if index is not None and index.exists():
        try:
            buckets = known_buckets(load_index(spec, index), settings, index.with_suffix(".rows"))
            return LargestBucket(bucket=_largest(buckets), source=f"the largest bucket of dataset {spec.id}, as scanned")
        except (UserError, ValueError):
            pass  # of another configuration, or without a usable image
    if listed := settings.listed_buckets:
        return LargestBucket(bucket=_largest(listed), source=f"the largest bucket that dataset {spec.id} lists")
    if _is_missing(spec):
        source = f"squares; the folder {spec.instance_data_dir} of dataset {spec.id} does not exist"
        return LargestBucket(bucket=settings.square, source=source)
    return LargestBucket(
        bucket=settings.square, source=f"squares; smalti dataset scan finds the largest bucket of dataset {spec.id}"
    )


def _is_missing(spec: DatasetSpec) -> bool:
    folder = spec.instance_data_dir
    return spec.type == "local" and folder is not None and not Path(folder).expanduser().exists()


def _largest(buckets: tuple[Bucket, ...]) -> Bucket:
    return max(buckets, key=lambda each: each.width * each.height)
