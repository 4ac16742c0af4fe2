"""Options as text, for the help, the reference page and JSON. Everything comes from the declared fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from smalti.config import Option, OptionGroup, Schema, package_of_option


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


def reference_page(schema: Schema) -> str:
    """The options of every section as a page of Markdown."""
    lines = [_INTRODUCTION, " · ".join(f"[{group.title}](#{_anchor(group.title)})" for group in schema.groups), ""]
    for group in schema.groups:
        lines += [f"## {group.title}", ""]
        options = [option for option in schema.options.values() if option.group is group]
        if package := package_of_option(options[0].name) if options else None:
            lines += [f"With the package `{package.distribution}`.", ""]
        lines += ["| option | value | default | meaning |", "|---|---|---|---|", *map(_reference_row, options), ""]
    return "\n".join(lines)


def _anchor(title: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _reference_row(option: Option) -> str:
    kind = option.kind.replace("|", " | ") + (f" ({option.bounds})" if option.bounds else "")
    notes = [option.help]
    if option.when:
        notes.append(f"Only with `{condition(option)}`.")
    if option.tradeoff:
        notes.append(f"Effect: {option.tradeoff}.")
    if option.aliases:
        notes.append(f"Also accepted: {', '.join(f'`{alias}`' for alias in option.aliases)}.")
    if option.accelerate:
        notes.append(f"Accelerate YAML: `{option.accelerate}`.")
    cells = (f"`{option.name}`", kind, default_text(option), " ".join(notes))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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


_INTRODUCTION = """\
# Options

For everyone who looks up an option: all options of `smalti train`, with those of the official plugins. In a terminal,
`smalti train --help lora` shows a section and `smalti train --help ema_decay` one option. `smalti config explain KEY` shows
the value in your run and its source. This page is generated: `smalti config reference > docs/configuration.md`.

## How to give options

There are four ways. If they disagree, the first of this list wins and a line at start says so:

1. a flag: `--learning_rate=1e-4` or `--learning-rate 1e-4`. A switch is `--use_ema` or `--no_use_ema`. A value that begins
   with `--` needs the `=`. Flags cannot be abbreviated. A list is one flag with commas, or the flag repeated;
2. the environment: `SMALTI_LEARNING_RATE=1e-4`. An empty variable counts as not set;
3. an Accelerate YAML (`--accelerate_config FILE`, or your default one), for the options below that name a key of it. Its
   other keys reach `accelerate launch` unchanged;
4. a configuration file in TOML, JSON or YAML: `learning_rate = 1e-4`. JSON may say `"--learning_rate"`. Keys may stand in a
   table named like their section (`[optimizer]`). `null` means "not given". The texts "true" and "false" are accepted for
   switches.

Case, dashes and underscores in names and choices do not matter. `none` unsets an option that has no default, unless it is a
text. Relative paths start at the current folder, and `~` is the home folder.

`{env:NAME}` in a text stands for that environment variable, in any of the four ways. It keeps secrets out of files: events,
file names, image metadata and messages show `{env:NAME}`, and a value of 8 or more characters is masked wherever it
appears. Each rank reads the variable from its own environment, so set it on every node; a rank without it says so. The
digest of the configuration is computed with `{env:NAME}`. Two things are not hidden: paths that are named so, and captions,
which are data. Secret options are accepted only from the environment or as `{env:NAME}`.

A run keeps its defaults. After its first step, options that you do not give keep the default of the version that began the
run, even after an update that changes it; a line at start says which. `mixed_precision=auto` keeps the precision that it
chose. `config.toml` in the run directory lists these values in a table `[defaults]`, which works in any configuration file
and which every other source overrides.

`smalti config show` prints the resolved configuration. It takes the same arguments as `smalti train`.

## Sections
"""
