"""`smalti plugins`: what is installed, in which state, and what it adds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click

from smalti.cli.output import counted, print_table
from smalti.cli.pages.help import Command
from smalti.config import family_packages
from smalti.hookspecs import HookSpecs
from smalti.plugins import BUILT_IN, PluginInfo, Plugins, RegisterHook, load_plugins, selection_of
from smalti.types import CommandCollector

_ADDS: Mapping[RegisterHook, str] = {
    HookSpecs.register_model_families: "families",
    HookSpecs.register_storage: "storages",
    HookSpecs.register_metadata_backends: "metadata backends",
    HookSpecs.register_columns: "columns",
    HookSpecs.register_optimizers: "optimizers",
    HookSpecs.register_periodic_work: "periodic work",
    HookSpecs.register_checkpoint_formats: "checkpoint formats",
    HookSpecs.register_caches: "caches",
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
    arguments = [f"--plugins={name}" for name in only] + [f"--without={name}" for name in without]
    loaded = load_plugins(selection_of(arguments, None, os.environ), strict=False)
    families = loaded.gather(HookSpecs.register_model_families)
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
        click.echo(f"\nno model family installed: {family_packages()}")


def _added(name: str, loaded: Plugins) -> dict[str, list[str]]:
    """What a plugin adds, by kind."""
    added = {kind: [entry.name for entry in loaded.call_one(name, hook) or ()] for hook, kind in _ADDS.items()}
    groups = loaded.call_one(name, HookSpecs.declare_options) or ()
    added["options"] = [option for group in groups for option in group.options.model_fields]
    commands = CommandCollector()
    loaded.call_one(name, HookSpecs.register_commands, commands=commands)
    below = [f"{group} {command}" for group, found in commands.groups.items() for command in found.commands]
    added["commands"] = [*commands.commands, *below]
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
