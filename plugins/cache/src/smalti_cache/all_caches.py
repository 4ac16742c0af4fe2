"""`smalti cache`: list and clear what plugins keep between runs. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import cast

import click

from smalti import CacheEntry, Config, HookSpecs, UserError, did_you_mean
from smalti.cli import CommandLine, Group, counted, format_bytes, print_table
from smalti.config import package_of, resolve
from smalti.plugins import Cache, Plugins, create, load_plugins, schema_of, selection_of
from smalti_cache.commands import Encodings, encode, prune, verify

_SETTINGS: dict[str, object] = {"ignore_unknown_options": True}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """One line of `smalti cache ls`."""

    name: str
    title: str
    place: str
    entries: int
    bytes: int


@click.group(cls=Group, examples=("smalti cache ls config.toml", "smalti cache clear fsdp-blocks"))
def cache() -> None:
    """Fill, list, verify and remove caches. Everything in a cache can be computed again.

    Caches of latents and captions, and some others, lie where the configuration says. For those give the same arguments as
    to `smalti train`.
    """


@cache.command(context_settings=_SETTINGS, examples=("smalti cache ls", "smalti cache ls config.toml --json"))
@_ARGUMENTS
@_JSON
def ls(arguments: tuple[str, ...], as_json: bool) -> None:
    """List all caches with their size and location.

    `damaged` counts entries that were found damaged, and packs that cannot be read. `age` is the time since the last pack,
    `used` since the last use by a run.
    """
    plugins, config = _load(arguments)
    reports, encodings = list_caches(plugins, config), Encodings(config, plugins)
    if as_json:
        click.echo(json.dumps({"caches": [asdict(report) for report in reports], "encodings": encodings.parts()}, indent=2))
        return
    shown = encodings.show()
    if reports:
        if shown:
            click.echo()
        lines = [
            (report.name, f"{report.entries:,}", format_bytes(report.bytes), report.title, report.place) for report in reports
        ]
        print_table(("cache", "entries", "size", "what", "where"), lines, right=(1, 2))


@cache.command(
    context_settings=_SETTINGS,
    examples=(
        "smalti cache clear fsdp-blocks",
        "smalti cache clear fsdp-blocks --yes",
        "smalti cache clear encodings config.toml",
    ),
)
@click.argument("name")
@_ARGUMENTS
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_JSON
def clear(name: str, arguments: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove everything in the cache NAME. Asks first on a terminal.

    NAME is one that `smalti cache ls` shows, or `encodings` for all caches of latents and captions.
    """
    plugins, config = _load(arguments)
    if Encodings(config, plugins).clear(name, yes=yes, as_json=as_json):
        return
    found = find_cache(plugins, name, config)
    if not yes and sys.stdin.isatty() and (size := found.size()):
        what = f"{counted(found.entries(), 'entry', 'entries')}, {format_bytes(size)}, in {found.place}"
        click.confirm(f"clear {what}?", abort=True, err=True)
    cleared = found.clear()
    if as_json:
        click.echo(json.dumps({"cache": name, "place": found.place, **asdict(cleared)}, indent=2))
        return
    removed = f"{counted(cleared.count, 'entry', 'entries')} ({format_bytes(cleared.bytes)})"
    click.echo(f"{found.place}: cleared {removed}" if cleared.bytes else f"{found.place}: nothing to clear")


cache.add_command(encode)
cache.add_command(prune)
cache.add_command(verify)


def _load(arguments: tuple[str, ...]) -> tuple[Plugins, Config | None]:
    """The plugins, and the configuration if arguments were given. Without arguments no valid configuration is needed."""
    if not arguments:
        return load_plugins(selection_of((), None, os.environ), strict=False), None
    command_line = CommandLine.parse(arguments)
    return command_line.plugins, command_line.config()


def list_caches(plugins: Plugins, config: Config | None = None) -> list[CacheReport]:
    """Every cache but those of encodings, with its size, sorted by name. `config` locates those whose place is an option."""
    reports = []
    for entry in _entries(plugins):
        found = _open(entry, plugins, config)
        reports.append(
            CacheReport(name=entry.name, title=entry.title, place=found.place, entries=found.entries(), bytes=found.size())
        )
    return reports


def find_cache(plugins: Plugins, name: str, config: Config | None = None) -> Cache:
    """The cache of this name, in any spelling. Raises UserError with the known names."""
    entries = {entry.name: entry for entry in _entries(plugins)}
    spelled = {_fold(each): each for each in entries}
    if _fold(name) in spelled:
        return _open(entries[spelled[_fold(name)]], plugins, config)
    if package := package_of("caches", _fold(name)):
        raise package.error(f"the cache {name!r} belongs to {package.distribution}")
    hint = did_you_mean(_fold(name), entries, count=3)
    raise UserError(f"unknown cache {name!r}", fix=f"{hint} caches: {', '.join(entries) or 'none'}".lstrip())


def _entries(plugins: Plugins) -> list[CacheEntry]:
    return [entry for entry in plugins.gather(HookSpecs.register_caches) if entry.factory]


def _open(entry: CacheEntry, plugins: Plugins, config: Config | None) -> Cache:
    if not entry.configured:
        return cast(Cache, create(entry, entry.factory))
    if config is None:
        config = resolve(schema_of(plugins), ("--accelerate_config=none",))
    return cast(Cache, create(entry, entry.factory, config))


def _fold(name: str) -> str:
    return name.strip().lower().replace("_", "-")
