"""`smalti deepspeed`: build, check and store DeepSpeed configurations. Imports no torch, no DeepSpeed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from smalti import ConfigError, ExitCode, UserError
from smalti.cli import Group, counted, print_table, write_output
from smalti_deepspeed.builder import FIELDS, Field, build, choices_of
from smalti_deepspeed.parsing import Document, parse

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FORCE = click.option("--force", is_flag=True, help="Replace what exists.")


@click.group(
    cls=Group,
    examples=(
        "smalti deepspeed build --stage=2 --to=zero2.json",
        "smalti deepspeed check zero2.json config.toml",
        "smalti deepspeed templates save zero2 zero2.json",
    ),
)
def deepspeed() -> None:
    """Build, check and store DeepSpeed configurations."""


# --- build ----------------------------------------------------------------------------------------------------------


def _choices(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each of the builder's fields."""
    for each in reversed(FIELDS):
        text = f"{each.question} [{each.default or 'auto'}]"
        command = click.option(f"--{each.name}", each.name, metavar=each.wanted, help=text)(command)
    return command


@deepspeed.command("build", examples=("smalti deepspeed build --stage=3 --offload_param=cpu --to=zero3.json",))
@_choices
@click.option("--to", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write a new file instead of printing.")
@_FORCE
def build_command(target: Path | None, force: bool, **given: str | None) -> None:
    """Build a DeepSpeed configuration from a few choices and print it as JSON.

    Without choices, it asks on a terminal. Whatever is left out is "auto" and follows the options of the run.
    """
    answers = {name: value for name, value in given.items() if value is not None}
    if not answers and sys.stdin is not None and sys.stdin.isatty():
        answers = _ask()
    document = build(choices_of(answers))
    text = json.dumps(document, indent=2) + "\n"
    write_output(text, target, replace=force, fix="--force replaces it, or choose another file")


def _ask() -> dict[str, str]:
    """One question after the other, on stderr, so that the answer can be kept; an empty answer leaves the default."""
    answers: dict[str, str] = {}
    for each in FIELDS:
        if not each.applies(answers):
            continue
        question = f"{each.question} ({each.wanted})"
        shown = bool(each.default)
        answers[each.name] = click.prompt(
            question, default=each.default, show_default=shown, value_proc=_reader(each), err=True
        )
    return answers


def _reader(field: Field) -> Callable[[str], str]:
    """Asks again after an answer that is none."""

    def read(text: str) -> str:
        try:
            field.read(text)
        except UserError as error:
            raise click.BadParameter(f"{error.message}: {error.fix}") from None
        return text

    return read


# --- check ----------------------------------------------------------------------------------------------------------


@deepspeed.command(
    "check",
    context_settings={"ignore_unknown_options": True},
    examples=("smalti deepspeed check zero3.json", "smalti deepspeed check zero3.json config.toml --json"),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@_JSON
@click.pass_context
def check_command(context: click.Context, file: Path, arguments: tuple[str, ...], as_json: bool) -> int:
    """Check a DeepSpeed configuration: syntax, keys and values.

    FILE is a JSON file, or - for standard input. With the arguments of `smalti train` after it, also checks whether the two
    contradict each other and whether the run could be launched, and prints the complete configuration that DeepSpeed would get.
    Exits with 2 if something is wrong.
    """
    from smalti_deepspeed.report import check_document, check_in_run

    text = _read(file)
    report = check_document(text, str(file))
    if arguments and not report.problems:
        report = check_in_run(text, arguments)
    if as_json:
        click.echo(json.dumps({"file": str(file), **report.as_json()}, indent=2))
    else:
        for notice in report.notices:
            click.echo(f"note: {notice}")
        for name, (key, value) in report.options.items():
            click.echo(f"option: {name} = {value!r}, by {key}")
        for problem in report.problems:
            click.echo(f"problem: {problem}")
        if report.complete is not None:
            click.echo(json.dumps(report.complete, indent=2))
        click.echo(f"{file}: {counted(len(report.problems), 'problem')}")
    return ExitCode.USAGE if report.problems else ExitCode.DONE


def _read(file: Path) -> str:
    """The text of a file, or of standard input for "-"."""
    if str(file) == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed", fix="name a file, or pipe the text in")
        return sys.stdin.read()
    from smalti.config import read_text

    return read_text(file)


# --- templates ------------------------------------------------------------------------------------------------------


@deepspeed.group(
    "templates",
    examples=("smalti deepspeed templates save zero3 zero3.json", "smalti deepspeed templates apply zero3 config.toml"),
)
def templates_group() -> None:
    """Store configurations under names and apply them to configuration files."""


@templates_group.command("ls", examples=("smalti deepspeed templates ls --json",))
@_JSON
def templates_ls(as_json: bool) -> None:
    """List the templates."""
    from smalti_deepspeed.templates import folder, templates

    found = templates()
    if as_json:
        click.echo(json.dumps({"folder": str(folder()), "templates": [each.as_json() for each in found]}, indent=2))
    elif found:
        print_table(("template", "what"), [(each.name, each.summary) for each in found])
    else:
        click.echo(f"no templates in {folder()}", err=True)


@templates_group.command("show", examples=("smalti deepspeed templates show zero3",))
@click.argument("name")
@_JSON
def templates_show(name: str, as_json: bool) -> None:
    """Print the template NAME. --json adds its path."""
    from smalti_deepspeed.templates import template

    found = template(name)
    shown = {**found.as_json(), "document": found.document} if as_json else found.document
    click.echo(json.dumps(shown, indent=2))


@templates_group.command("save", examples=("smalti deepspeed templates save zero3 zero3.json",))
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_FORCE
def templates_save(name: str, file: Path, force: bool) -> None:
    """Store the configuration in FILE as NAME. FILE may be - for standard input."""
    from smalti_deepspeed.report import check_document
    from smalti_deepspeed.templates import save_template

    text = _read(file)
    if problems := check_document(text, str(file)).problems:
        raise ConfigError(problems)
    document: Document = parse(text, str(file))
    saved = save_template(name, document, replace=force)
    click.echo(f"smalti: {saved.name}: {saved.summary}; saved to {saved.path}", err=True)


@templates_group.command("apply", examples=("smalti deepspeed templates apply zero3 config.toml",))
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_JSON
def templates_apply(name: str, file: Path, as_json: bool) -> None:
    """Set deepspeed_config in the configuration FILE to the template NAME."""
    from smalti.cli import CommandLine
    from smalti_deepspeed.templates import apply_template

    edit = apply_template(name, file.expanduser(), CommandLine.parse(()).schema)
    if as_json:
        shown = {"file": str(edit.path), "key": edit.key, "old": edit.old, "new": edit.new, "written": edit.written}
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"{edit.path}: {edit.key} {f'set to template {name}' if edit.written else 'unchanged'}")


@templates_group.command("rm", examples=("smalti deepspeed templates rm zero3",))
@click.argument("name")
def templates_rm(name: str) -> None:
    """Remove the template NAME."""
    from smalti_deepspeed.templates import remove_template

    click.echo(f"smalti: removed {remove_template(name)}", err=True)
