"""`smalti dataset`: what is in the datasets of a run, and whether the run can use them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from smalti.config import Config
from smalti.data.index import Progress
from smalti.data.prepared import Dataset, PreparedData, build_datasets
from smalti.data.reference import dataset_reference
from smalti.dataplan import Scan, catalog_of, dataset_specs, scan_data
from smalti.errors import UserError
from smalti.invocation import Invocation, take_switch
from smalti.plugins import Plugins
from smalti.settings import DataOptions, ModelOptions, RunOptions

_SHOWN = 10  # broken samples per dataset, in text
_USUAL_ALIGNMENT = 64
_WORDS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}


@click.group()
def dataset() -> None:
    """Scan datasets and check them against the batch size.

    `scan` and `check` take what `smalti train` takes: a configuration file first, then flags. With --output_dir they use the
    indexes of that run and bring them up to date; without it nothing is written.
    """


@dataset.command(context_settings=_WORDS)
@click.argument("words", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
def scan(words: tuple[str, ...]) -> None:
    """List what the datasets hold, and what of it cannot be used and why. --json prints JSON. Opens headers only."""
    config, plugins, as_json = _asked(words)
    catalog = catalog_of(plugins)
    specs, directory = dataset_specs(config, catalog), _directory(config)
    found = [
        *build_datasets(specs, catalog, directory, _progress()),
        *build_datasets(specs, catalog, directory, _progress(), kind="eval"),
    ]
    if as_json:
        click.echo(json.dumps({"datasets": [_described(one) for one in found]}, indent=2, ensure_ascii=False))
        return
    for one in found:
        broken = one.index.quarantined
        click.echo(f"{one.spec.id}: {len(one.index.healthy)} images, {len(broken)} set aside ({one.storage.location})")
        for item in broken[:_SHOWN]:
            click.echo(f"    {item.key}: {item.reason}")
        if len(broken) > _SHOWN:
            click.echo(f"    and {len(broken) - _SHOWN} more")
        for notice in one.notices:
            click.echo(f"    note: {notice}")


@dataset.command(context_settings=_WORDS)
@click.argument("words", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
def check(words: tuple[str, ...]) -> None:
    """Say whether every bucket of the run fills a batch, and how many steps an epoch has. --json prints JSON.

    Buckets are those of --model_family. Exits with 3 if a bucket is too small.
    """
    config, plugins, as_json = _asked(words)
    alignment, notices = _alignment(config, plugins)
    data = scan_data(config, plugins, alignment, _directory(config), _progress())
    notices += [*config.notices, *data.notices]
    click.echo(json.dumps(_buckets(data, notices), indent=2, ensure_ascii=False) if as_json else _as_text(data, notices))


@dataset.command()
def reference() -> None:
    """Print all keys of a dataset entry, as Markdown: the end of docs/datasets.md."""
    click.echo(dataset_reference(), nl=False)


def _asked(words: tuple[str, ...]) -> tuple[Config, Plugins, bool]:
    """The configuration, the plugins, and whether JSON is wanted."""
    rest = list(words)
    as_json = take_switch(rest, "--json")
    invocation = Invocation.read(rest)
    config = invocation.config()
    options = config[DataOptions]
    if not (options.data_backend_config or options.datasets or options.instance_data_dir):
        fix = "--instance_data_dir=FOLDER, --data_backend_config=FILE, or the configuration file of a run"
        raise UserError("no dataset is given", fix=fix)
    return config, invocation.plugins, as_json


def _alignment(config: Config, plugins: Plugins) -> tuple[int, list[str]]:
    """What sides of buckets are multiples of where the options do not say, and what to tell of it."""
    if config[ModelOptions].model_family is not None:
        from smalti.families import find_family

        return find_family(config, plugins).alignment, []
    if config[DataOptions].aspect_bucket_alignment is not None:
        return _USUAL_ALIGNMENT, []
    return _USUAL_ALIGNMENT, [f"no --model_family is given: sides of buckets are taken to be multiples of {_USUAL_ALIGNMENT}"]


def _directory(config: Config) -> Path | None:
    output = config[RunOptions].output_dir
    return output / "data" if output is not None else None


def _progress() -> Scan | None:
    """How far a scan is, where somebody watches."""

    def of(name: str) -> Progress:
        return lambda done, total: click.echo(f"{name}: {done} of {total}", err=True)

    return of if sys.stderr.isatty() else None


def _described(one: Dataset) -> dict[str, object]:
    return {
        "id": one.spec.id,
        "location": one.storage.location,
        "usable": len(one.index.healthy),
        "quarantined": [{"key": item.key, "reason": item.reason} for item in one.index.quarantined],
        "notices": list(one.notices),
    }


def _buckets(data: PreparedData, notices: list[str]) -> dict[str, object]:
    return {
        "effective_batch": data.order.effective_batch,
        "batches_per_epoch": data.order.epoch_start(1),
        "buckets": [
            {"width": content.bucket.width, "height": content.bucket.height, "samples": int(content.copies.sum())}
            for content in data.order.buckets
        ],
        "quarantined": len(data.quarantined),
        "notices": notices,
    }


def _as_text(data: PreparedData, notices: list[str]) -> str:
    lines = [f"{'bucket':>12} {'images':>9} {'with repeats':>13}"]
    lines += [
        f"{content.bucket!s:>12} {len(content.samples):>9} {int(content.copies.sum()):>13}" for content in data.order.buckets
    ]
    lines += [f"effective batch {data.order.effective_batch}, {data.order.epoch_start(1)} batches in the first epoch"]
    return "\n".join([*lines, *(f"note: {notice}" for notice in notices)])
