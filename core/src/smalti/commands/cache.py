"""`smalti cache`: what plugins keep between runs, and how to be rid of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import click

from smalti.caches import find_cache, list_caches
from smalti.commands.table import counted, in_bytes, print_table
from smalti.config import selection_of
from smalti.plugins import Plugins, load_plugins

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def cache() -> None:
    """List and clear what plugins keep between runs. All of it can be made again."""


@cache.command()
@_JSON
def ls(as_json: bool) -> None:
    """List all caches with their size and place."""
    reports = list_caches(_plugins())
    if as_json:
        click.echo(json.dumps({"caches": [asdict(report) for report in reports]}, indent=2))
        return
    if not reports:
        click.echo("no plugin keeps anything", err=True)
        return
    rows = [(report.name, f"{report.entries:,}", in_bytes(report.bytes), report.title, report.place) for report in reports]
    print_table(("cache", "entries", "size", "what", "where"), rows, right=(1, 2))


@cache.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_JSON
def clear(name: str, yes: bool, as_json: bool) -> None:
    """Remove everything in the cache NAME. On a terminal it asks first."""
    found = find_cache(_plugins(), name)
    if not yes and sys.stdin.isatty() and (size := found.size()):
        what = f"{counted(found.entries(), 'entry', 'entries')}, {in_bytes(size)}, in {found.place}"
        click.confirm(f"clear {what}?", abort=True, err=True)
    cleared = found.clear()
    if as_json:
        click.echo(json.dumps({"cache": name, "place": found.place, **asdict(cleared)}, indent=2))
        return
    told = f"{counted(cleared.count, 'entry', 'entries')} ({in_bytes(cleared.bytes)})"
    click.echo(f"{found.place}: {told} cleared" if cleared.bytes else f"{found.place}: nothing to clear")


def _plugins() -> Plugins:
    return load_plugins(selection_of((), None, os.environ), strict=False)
