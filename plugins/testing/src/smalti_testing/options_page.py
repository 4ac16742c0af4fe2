"""`smalti config reference`: every option from its declared field, and the page docs/reference/configuration.md."""

from __future__ import annotations

import json
import re

import click

from smalti.cli import (
    Command,
    CommandLine,
    Formatter,
    condition,
    default_text,
    describe,
    on_terminal,
    sections,
    show_page,
    write_options,
)
from smalti.config import Option, Schema, package_of


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    examples=(
        "smalti config reference",
        "smalti config reference --without=all > options.md",
        "smalti config reference --simpletuner",
    ),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--simpletuner", is_flag=True, help="List SimpleTuner's options, and what each of them becomes here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reference(arguments: tuple[str, ...], simpletuner: bool, as_json: bool) -> None:
    """List every option: as text on a terminal, else as Markdown.

    --plugins and --without select plugins, as in `smalti train`.
    """
    command_line = CommandLine.parse(arguments)
    command_line.config()
    schema = command_line.schema
    if simpletuner:
        click.echo(schema.dialect.page(schema), nl=False)
    elif as_json:
        click.echo(json.dumps({"options": [describe(option) for option in schema.options.values()]}, indent=2))
    elif on_terminal():
        formatter = Formatter()
        write_options(formatter, sections(schema, schema.options.values()), whole=True)
        show_page(formatter.getvalue().strip())
    else:
        click.echo(reference_page(schema), nl=False)


def reference_page(schema: Schema) -> str:
    """The options of every section as a page of Markdown."""
    lines = [_INTRODUCTION, " · ".join(f"[{group.title}](#{_anchor(group.title)})" for group in schema.groups), ""]
    for group in schema.groups:
        lines += [f"## {group.title}", ""]
        options = [option for option in schema.options.values() if option.group is group]
        if package := package_of("options", options[0].name) if options else None:
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


_INTRODUCTION = """\
# Options

For everyone who looks up an option: all options of `smalti train`, with those of the official plugins. In a terminal,
`smalti train --help lora` shows a section and `smalti train --help ema_decay` one option. `smalti config explain KEY` shows
the value in your run and its source. This page is generated: `smalti config reference > docs/reference/configuration.md`.

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
