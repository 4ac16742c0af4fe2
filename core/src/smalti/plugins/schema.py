"""The options of the active plugins, which plugins a configuration selects, and the problems that plugins find in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from smalti.config import GROUPS, PREFIX, Config, PluginOptions, Schema, expand, flat, read_mapping
from smalti.errors import ConfigError, InvalidOptionError, Problem
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import Selection
from smalti.plugins.registry import Plugins


def schema_of(plugins: Plugins) -> Schema:
    """The options of the core and of all active plugins; the core's sections come first.

    Raises UserError when two plugins declare the same option.
    """
    owners = {group.name: plugin for plugin, groups in plugins.answers(HookSpecs.declare_options).items() for group in groups}
    groups = [
        replace(group, owner=str(plugins.infos[owners[group.name]].origin))
        for group in plugins.gather(HookSpecs.declare_options)
    ]
    order = {group.name: index for index, group in enumerate(GROUPS)}
    groups.sort(key=lambda group: (order.get(group.name, len(order)), group.name))
    return Schema(tuple(groups), frozenset(entry.name for entry in plugins.gather(HookSpecs.register_optimizers)))


def selection_of(arguments: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> Selection:
    """Which plugins are selected, before any of them is imported: by flags, else the environment, else the file."""
    schema = Schema(tuple(group for group in GROUPS if group.options is PluginOptions))
    content = read_mapping(file) if file is not None else {}
    problems: list[Problem] = []
    layers: list[list[tuple[str, object, str]]] = [
        [(flag, value, flag) for flag, value in _flags_among(arguments, schema)],
        [(name.removeprefix(PREFIX), value, name) for name, value in environment.items() if name.startswith(PREFIX) and value],
        [(key, value, f"{key} in {file}") for key, value in flat(content, GROUPS)],
    ]
    chosen: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        found: dict[str, tuple[str, ...]] = {}
        for spelling, value, place in layer:
            if (option := schema.find(spelling)) is not None and value is not None:
                try:
                    values = cast(tuple[str, ...], option.check(expand(value, environment, place, problems)))
                except ValidationError:
                    fix = "give names, separated by commas"
                    problems.append(Problem(message=f"{option.name} cannot be {value!r}", where=place, fix=fix))
                else:
                    found[option.name] = (*found.get(option.name, ()), *values)
        chosen = found | chosen
    if problems:
        raise ConfigError(problems)
    return Selection(only=chosen.get("plugins", ()), without=chosen.get("without", ()))


def _flags_among(arguments: Sequence[str], schema: Schema) -> Iterator[tuple[str, str]]:
    """The flags of these options and their values. All other arguments are ignored."""
    for index, word in enumerate(arguments):
        flag, joined, text = word.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if word.startswith("--") and schema.find(flag) and (joined or not following.startswith("--")):
            yield flag, text if joined else following


def plugin_problems(config: Config, plugins: Plugins, *, without: Collection[str] = ()) -> list[Problem]:
    """The problems that the plugins, except `without`, find in the configuration.

    A plugin that reads an invalid option is skipped.
    """
    found: list[Problem] = []
    for name in plugins.infos:
        if name not in without:
            with suppress(InvalidOptionError):
                found += plugins.call_one(name, HookSpecs.check_config, config=config) or []
    return found


def check(config: Config, plugins: Plugins, *, without: Collection[str] = ()) -> None:
    """Raises ConfigError with the problems that the plugins find, if there are any."""
    if problems := plugin_problems(config, plugins, without=without):
        raise ConfigError(problems)
