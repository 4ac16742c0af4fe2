"""`smalti cache`: list and clear the caches of plugins."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import click

from smalti.cli.arguments import CommandLine
from smalti.cli.output import counted, format_bytes, print_table
from smalti.cli.pages.help import Group
from smalti.config import Config
from smalti.plugins import Plugins, find_cache, list_caches, load_plugins, selection_of

_SETTINGS: dict[str, object] = {"ignore_unknown_options": True}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, examples=("smalti cache ls", "smalti cache clear fsdp-blocks"))
def cache() -> None:
    """List and clear caches. Everything in a cache can be computed again.

    Some caches lie where the configuration says. For those give the same arguments as to `smalti train`.
    """


@cache.command(context_settings=_SETTINGS, examples=("smalti cache ls", "smalti cache ls config.toml --json"))
@_ARGUMENTS
@_JSON
def ls(arguments: tuple[str, ...], as_json: bool) -> None:
    """List all caches with their size and location."""
    reports = list_caches(*_load(arguments))
    if as_json:
        click.echo(json.dumps({"caches": [asdict(report) for report in reports]}, indent=2))
        return
    if not reports:
        click.echo("no plugin has a cache", err=True)
        return
    rows = [(report.name, f"{report.entries:,}", format_bytes(report.bytes), report.title, report.place) for report in reports]
    print_table(("cache", "entries", "size", "what", "where"), rows, right=(1, 2))


@cache.command(context_settings=_SETTINGS, examples=("smalti cache clear fsdp-blocks", "smalti cache clear fsdp-blocks --yes"))
@click.argument("name")
@_ARGUMENTS
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_JSON
def clear(name: str, arguments: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove everything in the cache NAME. Asks first on a terminal."""
    plugins, config = _load(arguments)
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


def _load(arguments: tuple[str, ...]) -> tuple[Plugins, Config | None]:
    """The plugins, and the configuration if arguments were given. Without arguments no valid configuration is needed."""
    if not arguments:
        return load_plugins(selection_of((), None, os.environ), strict=False), None
    command_line = CommandLine.parse(arguments)
    return command_line.plugins, command_line.config()
