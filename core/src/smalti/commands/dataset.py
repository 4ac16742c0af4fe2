"""`smalti dataset`: what is in the datasets, and whether a run can use them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from smalti.data.buckets import ResolutionType
from smalti.data.check import BatchShape
from smalti.data.index import Progress
from smalti.data.prepared import DataRules, Dataset, PreparedData, build_datasets, prepare
from smalti.data.spec import DataDefaults, DatasetSpec, load_backend_config, parse_datasets, unused_caches
from smalti.dataplan import catalog_of
from smalti.errors import ConfigError
from smalti.plugins import load_plugins

C = TypeVar("C", bound=Callable[..., object])

_SHOWN = 10  # broken samples per dataset, in text


def _option(name: str, **settings: Any) -> Callable[[C], C]:
    """A flag in both spellings, as everywhere else."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return click.option(*spellings, name, **settings)


_CONFIG = _option(
    "data_backend_config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A multidatabackend.json with the datasets.",
)
_OUTPUT = _option(
    "output_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="A run directory: its indexes are used and brought up to date. Without it nothing is written.",
)
_CAPTIONS = _option("caption_strategy", default="textfile", show_default=True, help="Where captions come from by default.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def dataset() -> None:
    """Scan datasets and check them against the batch size."""


@dataset.command()
@_CONFIG
@_OUTPUT
@_CAPTIONS
@_JSON
def scan(data_backend_config: Path, output_dir: Path | None, caption_strategy: str, as_json: bool) -> None:
    """List what the datasets hold, and what of it cannot be used and why. Opens headers only."""
    _, found = _scan(data_backend_config, output_dir, DataDefaults(caption_strategy=caption_strategy))
    if as_json:
        click.echo(json.dumps({"datasets": [_described(one) for one in found]}, indent=2, ensure_ascii=False))
        return
    for one in found:
        broken = one.index.quarantined
        click.echo(f"{one.spec.id}: {len(one.index.healthy)} pictures, {len(broken)} set aside ({one.storage.location})")
        for item in broken[:_SHOWN]:
            click.echo(f"    {item.key}: {item.reason}")
        if len(broken) > _SHOWN:
            click.echo(f"    and {len(broken) - _SHOWN} more")
        for notice in one.notices:
            click.echo(f"    note: {notice}")


@dataset.command()
@_CONFIG
@_OUTPUT
@_CAPTIONS
@_option("train_batch_size", type=click.IntRange(1), default=1, show_default=True, help="Pictures per rank and micro-batch.")
@_option("num_processes", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@_option("gradient_accumulation_steps", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches per step.")
@_option("resolution", type=click.FloatRange(0, min_open=True), default=1024.0, show_default=True, help="Default size.")
@_option("resolution_type", type=click.Choice(["pixel", "area", "pixel_area"]), default="pixel_area", show_default=True)
@_option("aspect_bucket_alignment", type=click.IntRange(1), default=64, show_default=True, help="Of the model family.")
@_option("aspect_bucket_rounding", type=click.IntRange(0, 9), default=2, show_default=True, help="Decimals of aspect ratios.")
@_option("data_error_budget", type=click.FloatRange(0), default=0.01, show_default=True, help="A share below 1, or a count.")
@_option("allow_dataset_oversubscription", is_flag=True, help="Raise the repeats of buckets that are too small.")
@_JSON
def check(
    data_backend_config: Path,
    output_dir: Path | None,
    caption_strategy: str,
    train_batch_size: int,
    num_processes: int,
    gradient_accumulation_steps: int,
    resolution: float,
    resolution_type: ResolutionType,
    aspect_bucket_alignment: int,
    aspect_bucket_rounding: int,
    data_error_budget: float,
    allow_dataset_oversubscription: bool,
    as_json: bool,
) -> None:
    """Say whether every bucket fills a batch. Also how many steps an epoch has. Exits with 3 if one does not."""
    defaults = DataDefaults(caption_strategy=caption_strategy, resolution=resolution, resolution_type=resolution_type)
    rules = DataRules(
        seed=0,  # which does not change how many batches there are
        shape=BatchShape(train_batch_size=train_batch_size, ranks=num_processes, accumulation=gradient_accumulation_steps),
        alignment=aspect_bucket_alignment,
        aspect_rounding=aspect_bucket_rounding,
        error_budget=data_error_budget,
        allow_oversubscription=allow_dataset_oversubscription,
    )
    specs, found = _scan(data_backend_config, output_dir, defaults)
    data = prepare(found, rules, notices=unused_caches(specs))
    click.echo(json.dumps(_buckets(data), indent=2, ensure_ascii=False) if as_json else _as_text(data))


def _scan(config: Path, output_dir: Path | None, defaults: DataDefaults) -> tuple[tuple[DatasetSpec, ...], tuple[Dataset, ...]]:
    """All entries, and the datasets of pictures among them."""
    catalog = catalog_of(load_plugins())
    specs, problems = parse_datasets(load_backend_config(config), where=str(config), defaults=defaults, catalog=catalog)
    if problems:
        raise ConfigError(problems)
    progress = _progress if sys.stderr.isatty() else None
    return specs, build_datasets(specs, catalog, output_dir / "data" if output_dir else None, progress)


def _progress(name: str) -> Progress:
    return lambda done, total: click.echo(f"{name}: {done} of {total}", err=True)


def _described(one: Dataset) -> dict[str, object]:
    return {
        "id": one.spec.id,
        "location": one.storage.location,
        "usable": len(one.index.healthy),
        "quarantined": [{"key": item.key, "reason": item.reason} for item in one.index.quarantined],
        "notices": list(one.notices),
    }


def _buckets(data: PreparedData) -> dict[str, object]:
    return {
        "effective_batch": data.order.effective_batch,
        "batches_per_epoch": data.order.epoch_start(1),
        "buckets": [
            {"width": content.bucket.width, "height": content.bucket.height, "samples": int(content.copies.sum())}
            for content in data.order.buckets
        ],
        "quarantined": len(data.quarantined),
        "notices": list(data.notices),
    }


def _as_text(data: PreparedData) -> str:
    lines = [f"{'bucket':>12} {'pictures':>9} {'with repeats':>13}"]
    lines += [
        f"{content.bucket!s:>12} {len(content.samples):>9} {int(content.copies.sum()):>13}" for content in data.order.buckets
    ]
    lines += [f"effective batch {data.order.effective_batch}, {data.order.epoch_start(1)} batches in the first epoch"]
    return "\n".join([*lines, *(f"note: {notice}" for notice in data.notices)])
