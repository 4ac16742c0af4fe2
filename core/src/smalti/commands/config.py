"""`smalti config`: what the configuration is, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from smalti import acceleratefile
from smalti.config import Config, resolve
from smalti.configfile import read_mapping
from smalti.configsources import PREFIX
from smalti.configtext import as_toml, put_into
from smalti.errors import ConfigError, UserError
from smalti.files import atomic_write
from smalti.invocation import Invocation, take_switch, take_value
from smalti.launch import expected_kind, merged_yaml, yaml_text
from smalti.options import unknown
from smalti.plugins import BUILT_IN
from smalti.reference import condition, default_text, describe, reference_page
from smalti.schema import check
from smalti.settings import LaunchOptions, launch_problems
from smalti.strategy import choose_distributed

_WORDS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}


@click.group()
def config() -> None:
    """Show, explain and document the configuration."""


@config.command(context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def show(words: tuple[str, ...]) -> None:
    """Print as TOML the configuration that WORDS give.

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
    """Say what KEY means, what it is, and where from. WORDS are those of `smalti train`."""
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
        "type": option.kind + (f", {option.bounds}" if option.bounds else ""),
        "default": default_text(option) or "none",
        "only with": condition(option),
        "trade-off": option.trade,
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


@config.command(context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def reference(words: tuple[str, ...]) -> None:
    """Print the reference page of all options, as Markdown. WORDS may select plugins: --plugin, --without."""
    invocation = Invocation.read(words)
    invocation.config()
    click.echo(reference_page(invocation.schema), nl=False)


@config.command("import-accelerate", context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def import_accelerate(words: tuple[str, ...]) -> None:
    """Say in TOML what an Accelerate YAML says. What has no counterpart gets a remark.

    WORDS are the YAML file, then flags that are to go before it. --to FILE.toml writes a file that is new; --merge sets the
    options in one that exists and leaves the rest of it alone, --force replaces it. --json prints values, sources and notices.
    """
    rest = list(words)
    as_json, merge, force = (take_switch(rest, name) for name in ("--json", "--merge", "--force"))
    target = _target(rest, ".toml")
    invocation = Invocation.read(rest)
    file = invocation.file
    if file is None:
        raise UserError("no Accelerate YAML is given", fix="smalti config import-accelerate FILE")
    content = read_mapping(file)
    if not acceleratefile.is_accelerate(content):
        raise UserError(f"{file} is no Accelerate configuration", fix="give a file that `accelerate config` wrote")
    resolved = resolve(invocation.schema, invocation.flags, file=file, environment={})
    notices = [*resolved.notices, *_left_over(content, resolved, file)]
    if as_json:
        values = {name: {"value": resolved.values()[name], "source": source} for name, source in resolved.sources.items()}
        click.echo(json.dumps({"values": values, "notices": notices}, indent=2))
        return
    if merge and target is not None and target.exists():
        read_mapping(target)  # complains about what is no TOML
        _tell_notices(notices)
        _write(target, put_into(target.read_text(encoding="utf-8"), resolved, resolved.sources))
        return
    text = "".join(f"# {notice}\n" for notice in notices) + as_toml(resolved, names=resolved.sources)
    _put_out(text, target, replace=force, ways="--merge keeps what else is in it, --force replaces it")


def _left_over(content: Mapping[str, object], resolved: Config, file: Path) -> Iterator[str]:
    """What a configuration file of ours cannot say."""
    for key, value in acceleratefile.uncovered(content, resolved.schema).items():
        kept = f"accelerate_config = {json.dumps(str(file))} keeps it in force"
        yield f"{key}: {json.dumps(value, default=str)} has no option; {kept}"
    default = acceleratefile.default_file(os.environ)
    if default is not None and default.exists() and default.samefile(file):
        yield f'{file} is the default of Accelerate, and goes before this file unless accelerate_config = "none"'


@config.command("export-accelerate", context_settings=_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def export_accelerate(words: tuple[str, ...]) -> None:
    """Print the Accelerate YAML of a launch on accelerators.

    WORDS are those of `smalti train`. --to FILE.yaml writes a file that is new, --force replaces one. --json prints JSON.
    """
    rest = list(words)
    as_json, force = take_switch(rest, "--json"), take_switch(rest, "--force")
    target = _target(rest, ".yaml", ".yml")
    invocation = Invocation.read(rest)
    resolved = invocation.config()
    if resolved[LaunchOptions].use_cpu:
        raise UserError("a launch on CPUs uses no Accelerate YAML", fix="--no_use_cpu for the one of a launch on accelerators")
    if problems := launch_problems(resolved[LaunchOptions]):
        raise ConfigError(problems)
    check(resolved, invocation.plugins, without=BUILT_IN)  # those want a model and data, of which such a file says nothing
    distributed = choose_distributed(resolved, invocation.plugins)
    merged = merged_yaml(resolved, distributed, expected_kind(resolved) or "cuda")
    notices = [*resolved.notices, *acceleratefile.differences(resolved.accelerate, merged, resolved.schema)]
    if as_json:
        _tell_notices(notices)
        _put_out(json.dumps(merged, indent=2) + "\n", target, replace=force, ways="--force replaces it")
        return
    text = "".join(f"# {notice}\n" for notice in notices) + yaml_text(merged)
    _put_out(text, target, replace=force, ways="--force replaces it")


def _target(words: list[str], *endings: str) -> Path | None:
    """The file after --to, which must have one of these endings: files are read by theirs."""
    given = take_value(words, "--to")
    target = Path(given).expanduser() if given is not None else None
    if target is not None and target.suffix.lower() not in endings:
        raise UserError(f"{target} does not end in {' or '.join(endings)}", fix=f"--to={target.with_suffix(endings[0])}")
    return target


def _tell_notices(notices: list[str]) -> None:
    for notice in notices:
        click.echo(f"smalti: note: {notice}", err=True)


def _put_out(text: str, target: Path | None, *, replace: bool, ways: str) -> None:
    """Print the text, or write it to a file that must be new unless it may be replaced. `ways` says how it may."""
    if target is None:
        click.echo(text, nl=False)
        return
    if target.exists() and not replace:
        raise UserError(f"{target} exists already", fix=ways)
    _write(target, text)


def _write(target: Path, text: str) -> None:
    try:
        atomic_write(target.resolve(), text.encode())
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}", fix="check the folder and its permissions") from None
    click.echo(f"smalti: wrote {target}", err=True)
