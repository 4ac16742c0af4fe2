"""`smalti config`: what the configuration is, and why."""

from __future__ import annotations

import json

import click

from smalti.configtext import as_toml
from smalti.errors import UserError
from smalti.invocation import Invocation, take_switch
from smalti.options import unknown
from smalti.reference import default_text, describe, reference_page

_WORDS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}


@click.group()
def config() -> None:
    """Show, explain and document the configuration."""


@config.command(context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def show(words: tuple[str, ...]) -> None:
    """Print the configuration that these words give, as TOML.

    WORDS are those of `smalti train`: a configuration file first, then flags. --all prints defaults too, --json every value
    with its source.
    """
    rest = list(words)
    as_json, complete = take_switch(rest, "--json"), take_switch(rest, "--all")
    resolved = Invocation.read(rest).config()
    if as_json:
        values = {name: {"value": value, "source": resolved.source(name)} for name, value in resolved.values().items()}
        click.echo(json.dumps({"digest": resolved.digest, "values": values, "notices": list(resolved.notices)}, indent=2))
        return
    for notice in resolved.notices:
        click.echo(f"# {notice}")
    click.echo(as_toml(resolved, complete=complete), nl=False)


@config.command(context_settings=_WORDS)
@click.argument("key")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def explain(key: str, words: tuple[str, ...]) -> None:
    """Say what KEY means, what it is with these words, and where that came from."""
    rest = list(words)
    as_json = take_switch(rest, "--json")
    invocation = Invocation.read(rest)
    option = invocation.schema.find(key)
    if option is None:
        problem = unknown(key, invocation.schema, where="")
        raise UserError(problem.message, fix=problem.fix)
    resolved = invocation.config()
    value = resolved.values().get(option.name, "(secret)")
    if as_json:
        click.echo(json.dumps({**describe(option), "value": value, "source": resolved.source(option.name)}, indent=2))
        return
    lines = {
        option.name: json.dumps(value),
        "source": resolved.source(option.name),
        "meaning": option.help,
        "value": option.kind + (f", {option.bounds}" if option.bounds else ""),
        "default": default_text(option) or "none",
        "section": option.group.title,
        "trade": option.trade,
        "only with": option.when,
        "also called": ", ".join(option.aliases),
    }
    for name, text in lines.items():
        if text:
            click.echo(f"{name:<12} {text}")
    for notice in resolved.notices:
        if notice.startswith((f"{option.name}:", f"{option.name} ")):
            click.echo(f"{'note':<12} {notice}")


@config.command(context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def reference(words: tuple[str, ...]) -> None:
    """Print the reference page of all options, as Markdown. WORDS may select plugins: --plugin, --without."""
    invocation = Invocation.read(words)
    invocation.config()
    click.echo(reference_page(invocation.schema), nl=False)
