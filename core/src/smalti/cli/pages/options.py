"""Options as text, for the help and JSON. Everything comes from the declared fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from smalti.config import Option, OptionGroup, Schema


def default_text(option: Option) -> str:
    """The default as it is written on the command line; empty if there is none."""
    default = option.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default).removesuffix(".0") if isinstance(default, float) else str(default)


def facts(option: Option, *, choices: bool, whole: bool) -> Iterator[str]:
    """What the help says of an option, in sentences; with `choices` also its choices, with `whole` all that is known of it."""
    yield option.help
    if choices:
        yield f"One of: {', '.join(option.choices)}."
    if whole and option.bounds:
        yield f"Range: {option.bounds}."
    if (default := default_text(option)) != "" and "Default:" not in option.help:
        yield f"Default: {_off_or_on(default) if option.is_flag else default}."
    if option.when:
        yield f"Only with {condition(option)}."
    if option.tradeoff:
        yield f"Effect: {option.tradeoff}."
    if whole and option.aliases:
        yield f"Also accepted: {', '.join(f'--{alias}' for alias in option.aliases)}."
    if whole and option.accelerate:
        yield f"Accelerate YAML: {option.accelerate}."


def _off_or_on(word: str) -> str:
    return {"false": "off", "true": "on"}.get(word, word)


def sections(schema: Schema, options: Iterable[Option]) -> dict[OptionGroup, list[Option]]:
    """These options by their groups, in the order of the schema; groups without any are left out."""
    wanted = {option.name for option in options}
    found = {
        group: [each for each in schema.options.values() if each.group is group and each.name in wanted]
        for group in schema.groups
    }
    return {group: members for group, members in found.items() if members}


def matching(schema: Schema, topic: str) -> list[Option]:
    """The options that a word means: those of a section, else those in whose names it begins a part.

    "ema" means use_ema and ema_decay.
    """
    word = topic.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")
    named = [
        group
        for group in schema.groups
        if word in (group.name, *group.title.lower().split(), group.title.lower().replace(" ", "_"))
    ]
    if named:
        return [each for each in schema.options.values() if each.group in named or each.name.startswith(f"{word}_")]
    return [each for each in schema.options.values() if any(f"_{word}" in f"_{name}" for name in (each.name, *each.aliases))]


def condition(option: Option) -> str:
    """What the option has an effect with, as a flag: "--use_ema", "--optimizer=adamw"; empty if always."""
    return f"--{option.when.replace(' == ', '=')}" if option.when else ""


def describe(option: Option) -> dict[str, object]:
    """One option as JSON, for machines and for web forms."""
    default = option.default
    return {
        "name": option.name,
        "section": option.group.title,
        "help": option.help,
        "kind": option.kind,
        "choices": list(option.choices),
        "bounds": option.bounds,
        "level": option.level,
        "when": option.when,
        "tradeoff": option.tradeoff,
        "aliases": list(option.aliases),
        "default": json.loads(
            json.dumps(default, default=lambda value: str(value) if isinstance(value, PurePath) else list(value))
        ),
    }
