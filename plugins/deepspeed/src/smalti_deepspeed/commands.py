"""`smalti deepspeed`: make, check and keep configurations of DeepSpeed. Imports no torch, no DeepSpeed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from smalti import ConfigError, ExitCode, UserError
from smalti.commands.table import counted, print_table
from smalti.files import atomic_write
from smalti_deepspeed.builder import FIELDS, Field, build, choices_of
from smalti_deepspeed.parsing import Document, parse

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FORCE = click.option("--force", is_flag=True, help="Replace what is there.")


@click.group(short_help="Make, check and keep configurations of DeepSpeed.")
def deepspeed() -> None:
    """Make, check and keep configurations of DeepSpeed, for --deepspeed_config."""


# --- build ----------------------------------------------------------------------------------------------------------


def _choices(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each of the builder's fields."""
    for each in reversed(FIELDS):
        text = f"{each.question} [{each.default or 'auto'}]"
        command = click.option(f"--{each.name}", each.name, metavar=each.wanted, help=text)(command)
    return command


@deepspeed.command("build")
@_choices
@click.option("--to", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write this file, which must be new.")
@_FORCE
def build_command(target: Path | None, force: bool, **given: str | None) -> None:
    """Make a configuration from a few choices and print it, as JSON.

    On a terminal and without any of them, it asks. What is left open is "auto", and comes from the options of the run.

    smalti deepspeed build --stage=3 --offload_param=cpu --to=zero3.json
    """
    answers = {name: value for name, value in given.items() if value is not None}
    if not answers and sys.stdin is not None and sys.stdin.isatty():
        answers = _ask()
    document = build(choices_of(answers))
    text = json.dumps(document, indent=2) + "\n"
    if target is None:
        click.echo(text, nl=False)
        return
    if target.exists() and not force:
        raise UserError(f"{target} exists already", fix="--force replaces it, or name another file")
    try:
        atomic_write(target.resolve(), text.encode())
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}", fix="check the folder and its permissions") from None
    click.echo(f"smalti: wrote {target}", err=True)


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


@deepspeed.command("check", context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("words", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@_JSON
@click.pass_context
def check_command(context: click.Context, file: Path, words: tuple[str, ...], as_json: bool) -> int:
    """Check the configuration in FILE: syntax, keys, values, what smalti does otherwise.

    With a configuration of smalti's, or with flags as to `smalti train`, also whether the two contradict each other, and
    whether the run could be launched; then the complete configuration that DeepSpeed would get is printed as well. Ends with
    exit code 2 if something is wrong.
    """
    from smalti_deepspeed.verdict import judge, judge_in_run

    text = _read(file)
    verdict = judge(text, str(file))
    if words and not verdict.problems:
        verdict = judge_in_run(text, words)
    if as_json:
        click.echo(json.dumps({"file": str(file), **verdict.as_json()}, indent=2))
    else:
        for notice in verdict.notices:
            click.echo(f"note: {notice}")
        for name, (key, value) in verdict.options.items():
            click.echo(f"option: {name} = {value!r}, by {key}")
        for problem in verdict.problems:
            click.echo(f"problem: {problem}")
        if verdict.complete is not None:
            click.echo(json.dumps(verdict.complete, indent=2))
        click.echo(f"{file}: {counted(len(verdict.problems), 'problem')}")
    return ExitCode.USAGE if verdict.problems else ExitCode.DONE


def _read(file: Path) -> str:
    """The text of a file, or of standard input for "-"."""
    if str(file) == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed", fix="name a file, or hand the text on with a pipe")
        return sys.stdin.read()
    from smalti.configfile import read_text

    return read_text(file)


# --- templates ------------------------------------------------------------------------------------------------------


@deepspeed.group("templates")
def templates_group() -> None:
    """Keep configurations under names, and put them into configuration files."""


@templates_group.command("ls")
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


@templates_group.command("show")
@click.argument("name")
@_JSON
def templates_show(name: str, as_json: bool) -> None:
    """Print the template NAME: its configuration, or with --json also its place."""
    from smalti_deepspeed.templates import template

    found = template(name)
    shown = {**found.as_json(), "document": found.document} if as_json else found.document
    click.echo(json.dumps(shown, indent=2))


@templates_group.command("save")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_FORCE
def templates_save(name: str, file: Path, force: bool) -> None:
    """Keep the configuration in FILE as NAME. "-" reads standard input, such as what `smalti deepspeed build` prints."""
    from smalti_deepspeed.templates import save_template
    from smalti_deepspeed.verdict import judge

    text = _read(file)
    if problems := judge(text, str(file)).problems:
        raise ConfigError(problems)
    document: Document = parse(text, str(file))
    saved = save_template(name, document, replace=force)
    click.echo(f"smalti: {saved.name}: {saved.summary}; kept as {saved.path}", err=True)


@templates_group.command("apply")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_JSON
def templates_apply(name: str, file: Path, as_json: bool) -> None:
    """Make the template NAME the deepspeed_config of the configuration FILE, of which all else stays as it is."""
    from smalti.invocation import Invocation
    from smalti_deepspeed.templates import apply_template

    edit = apply_template(name, file.expanduser(), Invocation.read(()).schema)
    if as_json:
        shown = {"file": str(edit.path), "key": edit.key, "old": edit.old, "new": edit.new, "written": edit.written}
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"{edit.path}: {edit.key} {f'is now template {name}' if edit.written else 'says so already'}")


@templates_group.command("rm")
@click.argument("name")
def templates_rm(name: str) -> None:
    """Remove the template NAME."""
    from smalti_deepspeed.templates import remove_template

    click.echo(f"smalti: removed {remove_template(name)}", err=True)
