"""Every option in words: the help of `smalti train`, and the reference page. Both come from the declared fields."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import PurePath

from smalti.options import Option, Schema


def default_text(option: Option) -> str:
    """The default as one would write it; empty if there is none."""
    default = option.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default).removesuffix(".0") if isinstance(default, float) else str(default)


def help_text(schema: Schema, *, everything: bool) -> str:
    """The options by section, for a terminal; only the basic ones unless `everything`."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for group in schema.groups:
        options = [each for each in schema.options.values() if each.group is group and (everything or each.level == "basic")]
        if not options:
            continue
        lines += ["", f"{group.title}:"]
        for option in options:
            lines += _help_entry(option, width)
    return "\n".join(lines)


def _help_entry(option: Option, width: int) -> Iterator[str]:
    head = f"  --[no_]{option.name}" if option.is_flag else f"  --{option.name}={option.kind}"
    facts = [option.help.rstrip(".")]
    if option.choices and len(head) > 32:
        head = f"  --{option.name}=word"
        facts.append(f"one of {', '.join(option.choices)}")
    if option.trade:
        facts.append(option.trade)
    if (default := default_text(option)) != "":
        facts.append(f"default {default}")
    if option.when:
        facts.append(f"with {option.when}")
    body = textwrap.wrap("; ".join(facts), width - 34)
    if len(head) > 32:
        yield head
        head = ""
    yield f"{head:<34}{body[0]}"
    for line in body[1:]:
        yield " " * 34 + line


def reference_page(schema: Schema) -> str:
    """The options of every section as a page of Markdown."""
    lines = [_INTRODUCTION]
    for group in schema.groups:
        lines += [f"## {group.title}", "", "| option | value | default | meaning |", "|---|---|---|---|"]
        for option in schema.options.values():
            if option.group is group:
                lines.append(_reference_row(option))
        lines.append("")
    return "\n".join(lines)


def _reference_row(option: Option) -> str:
    kind = option.kind.replace("|", " | ") + (f" ({option.bounds})" if option.bounds else "")
    notes = [option.help]
    if option.trade:
        notes.append(f"Trade: {option.trade}.")
    if option.when:
        notes.append(f"Only with `{option.when}`.")
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
        "trade": option.trade,
        "aliases": list(option.aliases),
        "default": json.loads(
            json.dumps(default, default=lambda value: str(value) if isinstance(value, PurePath) else list(value))
        ),
    }


_INTRODUCTION = """\
# Configuration

This page is generated from the options that the core declares: `smalti config reference --without all > docs/configuration.md`.
Plugins add sections; without `--without all` the command shows those of the installed ones too.

Every option can be given in four ways; the strongest wins, and a line at start says so when two differ:

1. a flag: `--learning_rate=1e-4` or `--learning-rate 1e-4`; a switch also as `--use_ema` and `--no_use_ema`. A value that
   begins with `--` needs the `=`. Flags are not abbreviated. A list is one flag with commas, or the flag repeated;
2. the environment: `SMALTI_LEARNING_RATE=1e-4`; an empty variable counts as not set;
3. an Accelerate YAML (`--accelerate_config FILE`, or the user's default one), for the options that name a key of it below;
   what else stands in it reaches `accelerate launch` unchanged;
4. a configuration file, TOML, JSON or YAML: `learning_rate = 1e-4`. In JSON, `"--learning_rate"` works as well. Keys may
   stand in a table that is named like their section (`[optimizer]`). `null` means "not given", and the texts "true" and
   "false" are as good as the words.

Case, dashes and underscores of names and choices do not matter. Options without a default, other than texts, can be taken back
with `none`. Relative paths start at the current folder, and `~` is the home folder.

`{env:NAME}` in a text stands for that environment variable, in any of the four ways. Files, events, file names, the metadata
of images and messages keep `{env:NAME}`; what it stands for (from 8 characters on) is masked there. Each rank takes it from its
own environment, so on several machines it must be set on each; one that lacks it says so. The digest of the configuration is
that of `{env:NAME}`. Two things are not hidden: the place of a file or folder that is named so, and captions, which are data.
Options that are secrets are taken from the environment or as `{env:NAME}` only.

A run keeps its defaults. Once it has made a step, options that nothing gives have the default of the version that began the
run, also after an update that changes one; a line at start says which. `config.toml` in the run directory lists them in a table
`[defaults]`, which works in any configuration file and which every other source overrides.

`smalti config show` prints the result, `smalti config explain KEY` one value and where it came from. Both take the same words
as `smalti train`.
"""
