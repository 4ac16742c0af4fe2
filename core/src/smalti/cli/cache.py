"""`smalti cache`: list and clear what plugins keep between runs."""

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
from smalti.plugins import Plugins, divided_caches, find_cache, list_caches, load_plugins, selection_of

_SETTINGS: dict[str, object] = {"ignore_unknown_options": True}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, examples=("smalti cache ls config.toml", "smalti cache clear fsdp-blocks"))
def cache() -> None:
    """List, verify and remove caches. Everything in a cache can be computed again.

    Caches of latents and captions, and some others, lie where the configuration says. For those give the same arguments as
    to `smalti train`.
    """


@cache.command(context_settings=_SETTINGS, examples=("smalti cache ls", "smalti cache ls config.toml --json"))
@_ARGUMENTS
@_JSON
def ls(arguments: tuple[str, ...], as_json: bool) -> None:
    """List all caches with their size and location.

    `damaged` counts damaged entries that were noted, and packs that cannot be read. `age` is the time since the last pack,
    `used` since the last use by a run.
    """
    plugins, config = _load(arguments)
    reports, divided = list_caches(plugins, config), divided_caches(plugins, config)
    if as_json:
        parts = {name: each.parts() for name, each in divided.items()}
        click.echo(json.dumps({"caches": [asdict(report) for report in reports], **parts}, indent=2))
        return
    shown = [each.show() for each in divided.values()]
    if reports:
        if any(shown):
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
    if any(each.clear(name, yes=yes, as_json=as_json) for each in divided_caches(plugins, config).values()):
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


def _load(arguments: tuple[str, ...]) -> tuple[Plugins, Config | None]:
    """The plugins, and the configuration if arguments were given. Without arguments no valid configuration is needed."""
    if not arguments:
        return load_plugins(selection_of((), None, os.environ), strict=False), None
    command_line = CommandLine.parse(arguments)
    return command_line.plugins, command_line.config()
