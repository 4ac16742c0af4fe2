"""`smalti plugins`: what is installed, what state it is in, what it adds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from smalti.plugins import PluginInfo, load_plugins
from smalti.schema import selection_of
from smalti.types import FamilyEntry


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plugin", "only", multiple=True, metavar="NAME", help="Use only this one besides the built-in ones.")
@click.option("--without", multiple=True, metavar="NAME", help='Leave this one out; "all" keeps the built-in ones.')
def plugins(as_json: bool, only: tuple[str, ...], without: tuple[str, ...]) -> None:
    """List plugins with their package, version, state and hooks.

    Selection works as in `smalti train`. A plugin that cannot be used is listed with the reason; one that is left out is not
    imported.
    """
    words = [f"--plugins={name}" for name in only] + [f"--without={name}" for name in without]
    loaded = load_plugins(selection_of(words, None, os.environ), strict=False)
    families = loaded.gather("register_model_families", FamilyEntry)
    if as_json:
        listing = {
            "plugins": [asdict(info) for info in loaded.infos.values()],
            "model_families": [{"name": family.name, "title": family.title} for family in families],
        }
        click.echo(json.dumps(listing, indent=2))
        return
    rows = [(info.name, info.source, info.state, _told(info)) for info in loaded.infos.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}")
    click.echo(f"\nmodel families: {', '.join(family.name for family in families) or 'none'}")


def _told(info: PluginInfo) -> str:
    return info.reason or ", ".join(info.hooks)
