"""`smalti config`: show and explain the configuration."""

from __future__ import annotations

import json

import click

from smalti.cli.arguments import CommandLine
from smalti.cli.pages.help import Group
from smalti.cli.pages.options import condition, default_text, describe
from smalti.config import PREFIX, as_toml, unknown
from smalti.errors import UserError

_UNPROCESSED = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, examples=("smalti config show runs/first/config.toml", "smalti config explain learning_rate"))
def config() -> None:
    """Show, explain and convert the configuration."""


@config.command(
    context_settings=_UNPROCESSED,
    examples=("smalti config show config.toml --seed=3", "smalti config show --all --model_family=toy > config.toml"),
)
@_ARGUMENTS
@click.option("--all", "complete", is_flag=True, help="Print defaults too.")
@_JSON
def show(arguments: tuple[str, ...], complete: bool, as_json: bool) -> None:
    """Print the resolved configuration as TOML.

    Takes the same arguments as `smalti train`. --json prints every value with its source.
    """
    resolved = CommandLine.parse(arguments).config()
    if as_json:
        values = {name: {"value": value, "source": resolved.source(name)} for name, value in resolved.values().items()}
        click.echo(json.dumps({"digest": resolved.digest, "values": values, "notices": list(resolved.notices)}, indent=2))
        return
    for notice in resolved.notices:
        click.echo(f"# {notice}")
    click.echo(as_toml(resolved, complete=complete), nl=False)


@config.command(
    context_settings=_UNPROCESSED,
    examples=("smalti config explain learning_rate", "smalti config explain seed config.toml --seed=3"),
)
@click.argument("key")
@_ARGUMENTS
@_JSON
def explain(key: str, arguments: tuple[str, ...], as_json: bool) -> None:
    """Show an option's meaning, value and source.

    After KEY, takes the same arguments as `smalti train`.
    """
    command_line = CommandLine.parse(arguments)
    option = command_line.schema.find(key)
    if option is None:
        problem = unknown(key, command_line.schema, where="")
        raise UserError(problem.message, fix=problem.fix)
    resolved = command_line.config()
    value = resolved.values().get(option.name, "(secret)")
    if as_json:
        click.echo(json.dumps({**describe(option), "value": value, "source": resolved.source(option.name)}, indent=2))
        return
    lines = {
        option.name: json.dumps(value),
        "source": resolved.source(option.name),
        "meaning": option.help,
        "type": option.kind + (f", {option.bounds}" if option.bounds else ""),
        "default": default_text(option) or "none",
        "only with": condition(option),
        "effect": option.tradeoff,
        "environment": f"{PREFIX}{option.name.upper()}",
        "section": option.group.title,
        "also called": ", ".join(option.aliases),
    }
    for name, text in lines.items():
        if text:
            click.echo(f"{name:<12} {text}")
    for notice in resolved.notices:
        if notice.startswith((f"{option.name}:", f"{option.name} ")):
            click.echo(f"{'note':<12} {notice}")
