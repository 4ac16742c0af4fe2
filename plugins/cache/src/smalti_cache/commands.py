"""`smalti cache` for latents and captions: encoded without a run, listed, verified and removed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import ClassVar, cast

import click

from smalti import Config, ExitCode, UserError
from smalti.cli import Command, CommandLine, counted, format_bytes, print_table
from smalti.config import DataOptions, RunOptions
from smalti.data import catalog_of
from smalti.plugins import Plugins, create
from smalti_cache.contents import CachedEncodings, Contents, cached_encodings, cached_encodings_in
from smalti_cache.options import CacheOptions
from smalti_cache.places import cache_folders

_SETTINGS: dict[str, object] = {"ignore_unknown_options": True}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_ENCODER = click.option(
    "--encoder", metavar="NAME", help="Only caches of this name, kind or family, which may have * and ?. Default: all."
)
_ALL = "encodings"
_SHOWN = 10  # unusable images, in text
_WHERE = "--cache_dir=FOLDER, --output_dir=RUN_DIRECTORY, or the configuration file of a run"


class Encodings:
    """The caches of all encoders, in the places that a configuration names."""

    def __init__(self, config: Config | None, plugins: Plugins) -> None:
        self._found = _encodings(config, plugins)

    def parts(self) -> list[dict[str, object]]:
        return [_described(each) | asdict(each.contents()) for each in self._found]

    def show(self) -> bool:
        if not self._found:
            click.echo(f"no latents and captions found; they are listed with {_WHERE}", err=True)
            return False
        names = ("encoder", "entries", "size", "packs", "damaged", "age", "used", "where")
        print_table(names, [_row(each, each.contents()) for each in self._found], right=(1, 2, 3, 4, 5, 6))
        return True

    def clear(self, name: str, *, yes: bool, as_json: bool) -> bool:
        chosen = [each for each in self._found if name in (each.name, _ALL)]
        if chosen or name == _ALL:
            _remove(chosen, dry_run=False, yes=yes, as_json=as_json)
        return bool(chosen) or name == _ALL


class _Age(click.ParamType[float]):
    """A duration such as 30d, 12h or 2w, in seconds."""

    name = "age"
    _UNITS: ClassVar[dict[str, int]] = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not an age; give one such as 30d, 12h or 2w", param, ctx)
        return float(match[1]) * self._UNITS[match[2]]


class _Share(click.ParamType[tuple[int, int]]):
    """A share such as 3/16: its number, from 1 on, and how many there are."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)/(\d+)", str(value).strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is not a share: give K/N with K from 1 to N, for example 3/16", param, ctx)
        return int(match[1]), int(match[2])


@click.command(
    cls=Command,
    context_settings=_SETTINGS,
    examples=(
        "smalti cache encode config.toml --cache_dir=/data/cache",
        "smalti cache encode config.toml --share=$SLURM_ARRAY_TASK_ID/16 --json",
        "smalti cache encode config.toml --engine=ray --address=head:6379",
    ),
)
@_ARGUMENTS
@click.option("--share", type=_Share(), default="1/1", metavar="K/N", help="Only part K of N equal parts. Default: all.")
@_JSON
def encode(arguments: tuple[str, ...], share: tuple[int, int], as_json: bool) -> None:
    """Encode the images and captions of a configuration as its training would, on one device, and train nothing.

    Shares may run at the same time, on any machines that see the cache. What is there is not encoded again, so an
    interrupted share continues with the same command. With --engine, a cluster encodes all of it.
    """
    from smalti.data import scan_entry
    from smalti_cache.encode_part import EncodedPart, encode_part
    from smalti_cache.wanted import Part

    command_line = CommandLine.parse(arguments)
    number, count = share
    begun = time.monotonic()

    def say(notice: str) -> None:
        click.echo(f"smalti: note: {notice}", err=True)

    config, plugins = command_line.config(), command_line.plugins
    engine = scan_entry(config, plugins, engine=True)
    if engine is None:
        done = encode_part(config, plugins, Part(number - 1, count), say)
    elif count > 1:
        raise UserError(f"--share is not for an engine: {engine.name} divides the work itself", fix="remove --share")
    else:
        done = cast(EncodedPart, create(engine, engine.encode, config, plugins, say))
    if as_json:
        described = {"share": number, "shares": count} | asdict(done) | {"seconds": round(time.monotonic() - begun, 1)}
        click.echo(json.dumps(described, indent=2))
        return
    click.echo(f"share {number} of {count}: encoded {done.images_encoded:,} of {done.images:,} images")
    click.echo(f"    and {done.texts_encoded:,} of {done.texts:,} texts; the others were there")
    for key in done.unusable[:_SHOWN]:
        click.echo(f"    cannot be read: {key}")
    if len(done.unusable) > _SHOWN:
        click.echo(f"    and {len(done.unusable) - _SHOWN} more")


@click.command(
    cls=Command,
    context_settings=_SETTINGS,
    examples=("smalti cache verify config.toml", "smalti cache verify --cache_dir=/data/cache --encoder='texts' --json"),
)
@_ARGUMENTS
@_ENCODER
@_JSON
@click.pass_context
def verify(context: click.Context, arguments: tuple[str, ...], encoder: str | None, as_json: bool) -> None:
    """Read every entry of the caches of latents and captions, and compare its checksum.

    Damaged entries are noted, and the next run encodes them again. Exits with 3 if there are any.
    """
    results = []
    for each in _selected(arguments, encoder):
        with _progress(each.name) as progress:
            results.append((each, each.verify(progress)))
    if as_json:
        click.echo(json.dumps({"encodings": [_described(each) | asdict(result) for each, result in results]}, indent=2))
    else:
        for each, result in results:
            state = f"{counted(result.missing, 'damaged entry', 'damaged entries')}" if result.missing else "verified"
            click.echo(f"{each}: {counted(result.entries, 'entry', 'entries')}, {format_bytes(result.bytes)}: {state}")
            for problem in result.problems:
                click.echo(f"    {problem}")
    if any(result.missing or result.problems for _, result in results):
        context.exit(ExitCode.PREFLIGHT)


@click.command(
    cls=Command,
    context_settings=_SETTINGS,
    examples=(
        "smalti cache prune --cache_dir=/data/cache --older_than=30d --dry_run",
        "smalti cache prune --cache_dir=/data/cache --unused=60d",
        "smalti cache prune config.toml --encoder='latents-sdxl-*'",
    ),
)
@_ARGUMENTS
@click.option("--older_than", type=_Age(), metavar="AGE", help="Only caches whose last pack is older: 30d, 12h.")
@click.option("--unused", type=_Age(), metavar="AGE", help="Only caches that no run has used for that long: 30d, 12h.")
@_ENCODER
@click.option("--dry_run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_JSON
def prune(
    arguments: tuple[str, ...],
    older_than: float | None,
    unused: float | None,
    encoder: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove whole caches of latents and captions: of an encoder, or those not used or added to for some time.

    A run notes a use when it starts, and once a day. No run may use what is removed. Other files are left.
    """
    if older_than is None and unused is None and encoder is None:
        fix = f"--unused=30d, --older_than=30d or --encoder=NAME; all: smalti cache clear {_ALL}"
        raise UserError("nothing says which caches to remove", fix=fix)
    chosen = _selected(arguments, encoder)
    if older_than is not None:
        chosen = [each for each in chosen if _age(each, each.written(), "age") > older_than]
    if unused is not None:
        chosen = [each for each in chosen if _age(each, each.used(), "time of the last use") > unused]
    _remove(chosen, dry_run=dry_run, yes=yes, as_json=as_json)


def _encodings(config: Config | None, plugins: Plugins) -> list[CachedEncodings]:
    """The caches of latents and captions; none if the configuration does not say where they are, or is without this plugin."""
    if config is None or "cache_dir" not in config.schema.options:
        return []
    options, output = config[DataOptions], config[RunOptions].output_dir
    folder = config[CacheOptions].cache_dir or (output / "cache" if output is not None else None)
    if folder is None:
        return []
    if options.data_backend_config or options.datasets or options.instance_data_dir:
        return cached_encodings(cache_folders(config, catalog_of(plugins)))
    return cached_encodings_in(folder)


def _selected(arguments: tuple[str, ...], encoder: str | None) -> list[CachedEncodings]:
    """The caches that a command is about. Raises UserError if there are none."""
    found = []
    if arguments:
        command_line = CommandLine.parse(arguments)
        found = _encodings(command_line.config(), command_line.plugins)
    chosen = [each for each in found if encoder is None or each.matches(encoder)]
    if not found:
        raise UserError("no cache of latents or captions found", fix=_WHERE)
    if not chosen:
        raise UserError(f"no cache matches {encoder!r}", fix=f"there are: {', '.join(each.name for each in found)}")
    return chosen


def _age(each: CachedEncodings, since: float | None, what: str) -> float:
    if since is None:
        raise UserError(f"the {what} of {each} is not known: its storage does not tell times", fix="--encoder=NAME")
    return time.time() - since


def _remove(chosen: Sequence[CachedEncodings], *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove caches, after a confirmation that names them. Raises UserError where nobody can answer."""
    contents = [each.contents() for each in chosen]
    if problems := [f"{each}: {problem}" for each in chosen if (problem := each.problem)]:
        raise UserError("nothing was removed: " + "; ".join(problems), fix="look at the folder, and delete it yourself")
    if not dry_run and not yes and chosen:
        for each, one in zip(chosen, contents, strict=True):
            click.echo(f"{each}: {counted(one.entries, 'entry', 'entries')}, {format_bytes(one.bytes)}", err=True)
        if not sys.stdin.isatty():
            raise UserError("nothing was removed: not confirmed", fix="--yes, or --dry_run to see what would be removed")
        total = format_bytes(sum(one.bytes for one in contents))
        click.confirm(f"remove {total}? No run may be using it.", abort=True, err=True)
    removed = [one.bytes if dry_run else each.remove() for each, one in zip(chosen, contents, strict=True)]
    if as_json:
        listed = [_described(each) | {"bytes": size} for each, size in zip(chosen, removed, strict=True)]
        click.echo(json.dumps({"removed": [] if dry_run else listed, "would_remove": listed if dry_run else []}, indent=2))
        return
    for each, size in zip(chosen, removed, strict=True):
        click.echo(f"{each}: {'would remove' if dry_run else 'removed'} {format_bytes(size)}")
    if not chosen:
        click.echo("nothing to remove")


def _described(each: CachedEncodings) -> dict[str, object]:
    return {"name": each.name, "kind": each.kind, "family": each.family, "place": f"{each}"}


def _row(each: CachedEncodings, contents: Contents) -> tuple[str, ...]:
    damaged = contents.damaged + len(contents.unreadable)
    ages = _text_of_age(contents.written), _text_of_age(contents.used)
    numbers = (f"{contents.entries:,}", format_bytes(contents.bytes), f"{contents.packs:,}", f"{damaged:,}")
    return (each.name, *numbers, *ages, f"{each}")


def _text_of_age(since: float | None) -> str:
    if since is None:
        return "?"
    minutes = max(0, int((time.time() - since) // 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 24 * 60 else f"{minutes // (24 * 60)} d"


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, on a terminal. Yields the function to call with the bytes done and the total."""
    with click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty(), show_eta=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = max(1, total)
            bar.update(done - bar.pos)

        yield progress
