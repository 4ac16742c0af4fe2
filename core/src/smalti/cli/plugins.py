"""`smalti plugins`: what is installed, in which state, and what it adds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import cast

import click

from smalti.cli.output import counted, print_table
from smalti.cli.pages.help import Command, CommandCollector
from smalti.config import OptionGroup, packages_with_families
from smalti.plugins import BUILT_IN, PluginInfo, Plugins, load_plugins, selection_of
from smalti.types import FamilyEntry, Registered

_ADDS = {
    "register_model_families": "families",
    "register_storage": "storages",
    "register_metadata_backends": "metadata backends",
    "register_optimizers": "optimizers",
    "register_checkpoint_formats": "checkpoint formats",
    "register_caches": "caches",
}
"""Hooks whose answers have names, and what these are called."""
_COLOURS = {"active": "green", "broken": "red", "incompatible": "red"}


@click.command(cls=Command, examples=("smalti plugins", "smalti plugins --hooks", "smalti plugins --without=all --json"))
@click.option("--hooks", is_flag=True, help="List the hooks that each plugin implements instead of what it adds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plugin", "only", multiple=True, metavar="NAME", help="Use only this plugin, in addition to the built-in ones.")
@click.option("--without", multiple=True, metavar="NAME", help='Disable this plugin. "all" keeps only the built-in ones.')
def plugins(hooks: bool, as_json: bool, only: tuple[str, ...], without: tuple[str, ...]) -> None:
    """List plugins with their version, state and what each adds.

    Plugins are selected as in `smalti train`. A plugin that cannot be loaded is listed with the reason. A disabled one is not
    imported.
    """
    words = [f"--plugins={name}" for name in only] + [f"--without={name}" for name in without]
    loaded = load_plugins(selection_of(words, None, os.environ), strict=False)
    families = loaded.gather("register_model_families", FamilyEntry)
    added = {name: _added(name, loaded) for name in loaded.infos}
    if as_json:
        listing = {
            "plugins": [{**asdict(info), "adds": added[info.name]} for info in loaded.infos.values()],
            "model_families": [{"name": family.name, "title": family.title} for family in families],
        }
        click.echo(json.dumps(listing, indent=2))
        return
    rows = [
        (info.name, _version(info), info.state, _last(info, added[info.name], hooks=hooks)) for info in loaded.infos.values()
    ]
    print_table(("plugin", "version", "state", "hooks" if hooks else "adds"), rows, colours=_COLOURS)
    if not families:
        click.echo(f"\nno model family installed: {packages_with_families()}")


def _added(name: str, loaded: Plugins) -> dict[str, list[str]]:
    """What a plugin adds, by kind."""

    def answers(hook: str) -> list[object]:
        found = loaded.call_only(name, hook) if hook in loaded.infos[name].hooks else []
        return [each for answer in found for each in cast(list[object], answer or [])]

    added = {kind: [entry.name for entry in cast(list[Registered], answers(hook))] for hook, kind in _ADDS.items()}
    groups = cast(list[OptionGroup], answers("declare_options"))
    added["options"] = [option for group in groups for option in group.options.model_fields]
    if "register_commands" in loaded.infos[name].hooks:
        commands = CommandCollector()
        loaded.call_only(name, "register_commands", commands=commands)
        added["commands"] = list(commands.commands)
    return {kind: names for kind, names in added.items() if names}


def _last(info: PluginInfo, added: Mapping[str, Sequence[str]], *, hooks: bool) -> str:
    if info.reason:
        return info.reason
    if hooks:
        return ", ".join(info.hooks)
    parts = ["strategy"] if "configure_distributed" in info.hooks else []
    parts += [f"{kind}: {', '.join(names)}" for kind, names in added.items() if kind != "options"]
    if "options" in added:
        parts.append(counted(len(added["options"]), "option"))
    observes = any(hook.startswith(("on_", "log_")) for hook in info.hooks)
    return "; ".join(parts) or ("observer" if observes else ", ".join(info.hooks))


def _version(info: PluginInfo) -> str:
    """The version; with the package, where its name does not follow from that of the plugin."""
    expected = "smalti" if info.name in BUILT_IN else f"smalti-{info.name.replace('_', '-')}"
    return info.version if info.distribution == expected else info.source
