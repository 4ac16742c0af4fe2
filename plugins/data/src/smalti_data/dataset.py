"""`smalti dataset`: scan the datasets of a run and check that the run can use them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from smalti import PreflightError, UserError
from smalti.cli import CommandLine, Group, counted
from smalti.config import Config, DataOptions, ModelOptions, RunOptions
from smalti.data import (
    BatchShape,
    Dataset,
    PreparedData,
    Progress,
    Quarantined,
    Scan,
    build_datasets,
    catalog_of,
    data_rules,
    dataset_specs,
    prepare,
    scan_data,
    scan_entry,
    unused_caches,
)
from smalti.plugins import Plugins, create
from smalti_data import dataset_report as report
from smalti_data.full_check import damaged_images, trained_on
from smalti_data.visits import visits_at

_SHOWN = 10  # lines of a list, in text
_DEFAULT_ALIGNMENT = 64
_UNPROCESSED = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_PROGRESS = click.option("--progress", "shows", is_flag=True, help="Print progress to standard error, also without a terminal.")


@click.group(
    cls=Group,
    examples=(
        "smalti dataset scan --instance_data_dir=photos",
        "smalti dataset check config.toml --train_batch_size=4",
    ),
)
def dataset() -> None:
    """Scan datasets, check them against the batch size, and show what a run will see.

    `scan`, `check`, `buckets` and `order` take the same arguments as `smalti train`. With --output_dir they use and update the
    indexes of that run; without it nothing is written.
    """


@dataset.command(
    context_settings=_UNPROCESSED,
    examples=("smalti dataset scan --instance_data_dir=photos", "smalti dataset scan config.toml --full --json"),
)
@_ARGUMENTS
@click.option("--full", is_flag=True, help="Decode every image, which finds files that are damaged behind their headers.")
@_JSON
@_PROGRESS
def scan(arguments: tuple[str, ...], full: bool, as_json: bool, shows: bool) -> None:
    """List images per dataset, unusable files and the reason, and held-out images that are trained on.

    Reads only the headers of images, except with --full. With --engine=ray, a Ray cluster scans.
    """
    config, plugins = _load(arguments)
    progress = _progress(shows)
    training, held_out, _ = _scanned(config, plugins, progress)
    found = [*training, *held_out]
    damaged = [tuple(damaged_images(one, progress(one.spec.id) if progress else None)) if full else () for one in found]
    seen = trained_on(training, held_out)
    if as_json:
        datasets = [_described(one, images) for one, images in zip(found, damaged, strict=True)]
        same = [{"held_out": one, "training": other} for one, other in seen.items()]
        _show({"datasets": datasets, "full": full, "held_out_in_training": same, "traffic": report.traffic(found)})
        return
    for one, images in zip(found, damaged, strict=True):
        unusable = (*one.index.quarantined, *images)
        click.echo(f"{one.spec.id}: {len(one.index) - len(unusable)} images, {len(unusable)} unusable ({one.storage.location})")
        _list([f"{item.key}: {item.reason}" for item in unusable])
        for notice in one.notices:
            click.echo(f"    note: {notice}")
    if seen:
        what = counted(len(seen), "held-out image is", "held-out images are")
        click.echo(f"{what} also trained on: size and first 16 KiB of the files are the same")
        _list([f"{one} is {other}" for one, other in seen.items()])
    for line in report.traffic_lines(found):
        click.echo(line)
    if not full:
        click.echo("only the headers of images were read; --full decodes every image")


@dataset.command(
    context_settings=_UNPROCESSED,
    examples=(
        "smalti dataset check config.toml",
        "smalti dataset check --model_family=toy --instance_data_dir=photos",
    ),
)
@_ARGUMENTS
@_JSON
@_PROGRESS
def check(arguments: tuple[str, ...], as_json: bool, shows: bool) -> None:
    """Check that every bucket fills a batch, and count the steps of an epoch.

    Takes the same arguments as `smalti train`. Buckets are those of --model_family. Exits with 3 if a bucket is too small.
    """
    config, plugins = _load(arguments)
    alignment, notices = _alignment(config, plugins)
    data = scan_data(config, plugins, alignment, _directory(config), _progress(shows))
    notices += [*config.notices, *data.notices]
    _show(report.checked(data, notices) if as_json else report.checked_text(data, notices))


@dataset.command(
    context_settings=_UNPROCESSED,
    examples=("smalti dataset buckets config.toml", "smalti dataset buckets config.toml --train_batch_size=8 --json"),
)
@_ARGUMENTS
@_JSON
@_PROGRESS
def buckets(arguments: tuple[str, ...], as_json: bool, shows: bool) -> None:
    """Show how many images have which shape, and what a run does about shapes that are rare.

    Takes the same arguments as `smalti train`. `smallest repeats` fills a batch with images of that shape alone.
    """
    config, plugins = _load(arguments)
    alignment, notices = _alignment(config, plugins)
    data, shape, outcome = _scanned_buckets(config, plugins, alignment, _progress(shows))
    notices += [*config.notices, *outcome]
    _show(report.buckets(data, shape, notices) if as_json else report.buckets_text(data, shape, notices))


@dataset.command(
    context_settings=_UNPROCESSED,
    examples=("smalti dataset order config.toml --batches=3", "smalti dataset order config.toml --position=1000 --json"),
)
@_ARGUMENTS
@click.option("--batches", type=click.IntRange(min=1), default=1, help="How many batches to show. Default: 1.")
@click.option("--position", type=click.IntRange(min=0), default=0, help="Number of batches before the first. Default: 0.")
@_JSON
def order(arguments: tuple[str, ...], batches: int, position: int, as_json: bool) -> None:
    """Show the images and captions of the next batches, as a new run sees them.

    Takes the same arguments as `smalti train`. Images that turn out to be broken are replaced in the run.
    """
    config, plugins = _load(arguments)
    alignment, notices = _alignment(config, plugins)
    data = scan_data(config, plugins, alignment, _directory(config), _progress())
    shape, positions = data_rules(config, plugins, alignment).shape, range(position, position + batches)
    options = config[DataOptions]
    cached, dropout = _texts_are_cached(config, plugins), options.caption_dropout_probability
    visits = [visits_at(data, each, texts_cached=cached, dropout=dropout) for each in positions]
    if as_json:
        _show({"batches": report.batches(data, shape, positions, visits), "notices": notices})
    else:
        _show("\n".join([report.batches_text(data, shape, positions, visits), *(f"note: {notice}" for notice in notices)]))


def _load(arguments: tuple[str, ...]) -> tuple[Config, Plugins]:
    """The configuration and the plugins."""
    command_line = CommandLine.parse(arguments)
    config = command_line.config()
    options = config[DataOptions]
    if not (options.data_backend_config or options.datasets or options.instance_data_dir):
        fix = "--instance_data_dir=FOLDER, --data_backend_config=FILE, or the configuration file of a run"
        raise UserError("no dataset given", fix=fix)
    return config, command_line.plugins


class _Scanned(NamedTuple):
    """All datasets; `notices` are none, since each dataset has its own."""

    training: tuple[Dataset, ...]
    held_out: tuple[Dataset, ...]
    notices: tuple[str, ...] = ()


def _scanned(config: Config, plugins: Plugins, progress: Scan | None) -> _Scanned:
    """Scan all datasets, in this process or by the engine that the configuration names."""
    catalog, directory = catalog_of(plugins), _directory(config)
    specs, found = dataset_specs(config, catalog), list[_Scanned]()

    def scan(build: Callable[..., tuple[Dataset, ...]] = build_datasets) -> _Scanned:
        training, held_out = (build(specs, catalog, directory, progress, kind=kind) for kind in ("image", "eval"))
        found.append(_Scanned(training, held_out))
        return found[-1]

    engine = scan_entry(config, plugins, engine=True)
    if engine is None:
        return scan()
    if directory is None:
        raise UserError(f"{engine.name} scans for a folder that all its nodes see", fix="--output_dir=RUN_DIRECTORY")
    from smalti import World
    from smalti.parallel import GlooCommunicator

    create(engine, engine.scan, config, plugins, directory, GlooCommunicator(world=World(), group=None), scan)
    return found[-1]


def _alignment(config: Config, plugins: Plugins) -> tuple[int, list[str]]:
    """The default alignment of bucket sizes, and notices about it."""
    if config[ModelOptions].model_family is not None:
        from smalti.plugins import find_family

        return find_family(config, plugins).alignment, []
    if config[DataOptions].aspect_bucket_alignment is not None:
        return _DEFAULT_ALIGNMENT, []
    return _DEFAULT_ALIGNMENT, [f"--model_family is not given: assuming bucket sizes in multiples of {_DEFAULT_ALIGNMENT}"]


def _texts_are_cached(config: Config, plugins: Plugins) -> bool:
    """Whether a run encodes captions before it trains, so that it picks one of a few variants of each."""
    if config[DataOptions].text_cache_disable or config[ModelOptions].model_family is None:
        return not config[DataOptions].text_cache_disable
    from smalti.plugins import find_family

    return find_family(config, plugins).cacheable


def _show(found: report.Json | str) -> None:
    click.echo(found if isinstance(found, str) else json.dumps(found, indent=2, ensure_ascii=False))


def _directory(config: Config) -> Path | None:
    output = config[RunOptions].output_dir
    return output / "data" if output is not None else None


def _progress(shows: bool = False) -> Scan | None:
    """The progress of a scan, on a terminal or where it `shows` in any case."""

    def of(name: str) -> Progress:
        return lambda done, total: click.echo(f"{name}: {done}" + (f" of {total}" if total else ""), err=True)

    return of if shows or sys.stderr.isatty() else None


def _list(lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        click.echo(f"    {line}")
    if len(lines) > _SHOWN:
        click.echo(f"    and {len(lines) - _SHOWN} more")


def _described(one: Dataset, damaged: Sequence[Quarantined]) -> dict[str, object]:
    unusable = (*one.index.quarantined, *damaged)
    return {
        "id": one.spec.id,
        "location": one.storage.location,
        "images": len(one.index),
        "usable": len(one.index) - len(unusable),
        "quarantined": [{"key": item.key, "reason": item.reason} for item in unusable],
        "notices": list(one.notices),
    }


def _scanned_buckets(
    config: Config, plugins: Plugins, alignment: int, progress: Scan | None
) -> tuple[PreparedData, BatchShape, tuple[str, ...]]:
    """The training datasets with buckets that cannot fill a batch as they are, the shape of a batch, and what a run says."""
    catalog, directory = catalog_of(plugins), _directory(config)
    specs, rules = dataset_specs(config, catalog), data_rules(config, plugins, alignment)
    datasets, unused = build_datasets(specs, catalog, directory, progress), unused_caches(specs)
    one = replace(rules, shape=BatchShape(train_batch_size=1, ranks=1, accumulation=1))
    data = prepare(datasets, one, notices=unused, directory=directory)
    try:
        notices = prepare(datasets, rules, notices=unused, directory=directory).notices
    except PreflightError as error:
        notices = (*data.notices, f"a run ends here: {error.message.splitlines()[0]}")
    return data, rules.shape, notices
