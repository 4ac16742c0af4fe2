"""Entry points of the command line. Commands are imported when they are used; only those that need torch import it."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

import click

from smalti.cli.commands import plugin as BUILT_IN
from smalti.cli.pages.help import Root, colour, dashed
from smalti.errors import ExitCode, UserError
from smalti.system import ProcessExit, ignore_signals_after_command, ignore_write_errors, keep_imports, reserve_stdout
from smalti.types import CommandCollector

SECTIONS = ("Training", "Data", "Configuration", "Node", "From plugins")
"""Headings of the list of commands, in the order of the help."""
EXAMPLES = (
    "smalti train config.toml",
    "smalti train --help lora",
    "smalti run ls",
    "smalti checkpoint export runs/first --to=model",
)
_SPELLING = {"token_normalize_func": dashed}
"""Settings that every command inherits, also those of plugins."""


class Commands(Root):
    """Those of other packages are loaded only where they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.from_plugins().commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = CommandCollector()
        BUILT_IN.register_commands(own)
        return own.get_command(ctx, cmd_name) or self.from_plugins().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = self.from_plugins().commands
        width = max(map(len, commands))
        for title in SECTIONS:
            members = [name for name, each in commands.items() if (getattr(each, "section", "") or SECTIONS[-1]) == title]
            if rows := [(f"{name:<{width}}", commands[name].get_short_help_str(80)) for name in members]:
                with formatter.section(title):
                    formatter.write_dl(rows)


@click.group(cls=Commands, context_settings=_SPELLING, examples=EXAMPLES, epilog="Every command has --help.")
@click.version_option(package_name="smalti", prog_name="smalti")
def smalti() -> None:
    """Train diffusion models on one GPU or many nodes."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `smalti`. Exits with the codes of `smalti.errors.ExitCode`."""
    if arguments is None:
        _run_as_process(sys.argv[1:])
    sys.exit(_run(arguments))  # the caller continues in this process


def main_train() -> None:
    """Entry point of `smalti-train`: the same as `smalti train`."""
    _run_as_process(["train", *sys.argv[1:]])


def _run_as_process(arguments: list[str]) -> NoReturn:
    end = ProcessExit.install()
    ignore_signals_after_command()
    keep_imports()
    ignore_write_errors("stderr")
    end.code = _run(arguments)
    sys.exit(end.code)


def _run(arguments: list[str]) -> int:
    reserve_stdout("--json" in arguments)
    try:
        code = smalti.main(args=arguments, prog_name="smalti", standalone_mode=False, color=colour())
    except UserError as error:
        _print_error(str(error), error)
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
        else:
            _print_error(str(_with_fix(error)), error)
        return ExitCode.USAGE
    except click.Abort:
        click.echo("smalti: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the top level: only the exit code follows
        traceback.print_exc()
        _print_error(f"{type(error).__name__}: {error}", error)
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.DONE


def _with_fix(error: click.ClickException) -> UserError:
    """An error of click in the form of the others: the command, what is wrong, and how the command is called."""
    message, context = error.format_message().removesuffix("."), getattr(error, "ctx", None)
    if context is None:  # not raised by a command
        return UserError(message, fix="smalti --help lists the commands")
    words = [context.command_path, *context.command.collect_usage_pieces(context)]
    fix = f"{' '.join(words)}; {context.command_path} --help explains them"
    if message.endswith("does not exist"):
        fix = "check the path; relative paths start at the current folder"
    return UserError(f"{context.command_path.removeprefix('smalti ')}: {message[:1].lower()}{message[1:]}", fix=fix)


def _print_error(message: str, error: BaseException) -> None:
    """Print the error as the last lines of output, with the plugin that raised it, if any."""
    click.echo(f"{click.style('smalti: error:', fg='red', bold=True)} {message}", err=True, color=colour())
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  {note}", err=True)
