"""Entry points of the command line. Commands are imported when they are used; only those that need torch import it."""

from __future__ import annotations

import os
import sys
import traceback
from difflib import get_close_matches
from importlib.metadata import version
from pkgutil import resolve_name
from typing import NoReturn

import click

from smalti.cli.pages.help import CommandCollector, Group, colour, dashed
from smalti.config import package_of_command
from smalti.errors import ExitCode, UserError
from smalti.system import ProcessExit, describe, ignore_signals_after_command, ignore_write_errors, keep_imports

COMMANDS = {
    "train": ("smalti.cli.train:train", "Train a model, or resume its training."),
    "plan": ("smalti.cli.jobs.plan:plan", "Say what fits on which GPUs, and what is fastest, before a launch."),
    "launch": ("smalti.cli.jobs.launch:launch", "Write the job with which SLURM or Kubernetes starts a run."),
    "plugins": ("smalti.cli.plugins:plugins", "List plugins and what each adds."),
    "plugin": ("smalti.cli.plugin:plugin", "Create a plugin package."),
    "doctor": ("smalti.cli.doctor.command:doctor", "Check this node; each problem with its fix."),
    "config": ("smalti.cli.config:config", "Show, explain and convert the configuration."),
    "dataset": ("smalti.cli.dataset:dataset", "Scan datasets and check them against the batch size."),
    "cache": ("smalti.cli.cache:cache", "List, verify and remove caches."),
    "checkpoint": ("smalti.cli.checkpoint:checkpoint", "List, inspect, verify, convert and export checkpoints."),
}
SECTIONS = {
    "Training": ("plan", "train", "launch", "run", "checkpoint"),
    "Data": ("dataset", "cache"),
    "Configuration": ("config", "plugins", "plugin"),
    "Node": ("doctor",),
}
"""The commands by topic, in the order of the help. All others come from plugins."""
EXAMPLES = (
    "smalti train config.toml",
    "smalti train --help lora",
    "smalti run ls",
    "smalti checkpoint export runs/first --to=model",
)
_SPELLING = {"token_normalize_func": dashed}
"""Settings that every command inherits, also those of plugins."""


def built_in_commands() -> dict[str, click.Command]:
    """The built-in commands, by name."""
    return {name: resolve_name(address) for name, (address, _) in COMMANDS.items()}


class Commands(Group):
    """The built-in commands and those of plugins. Plugins are loaded only if the command is not a built-in one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(self._from_plugins())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return self._from_plugins().get(cmd_name)
        command: click.Command = resolve_name(COMMANDS[cmd_name][0])
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        if package := package_of_command(name):
            raise package.error(f"the command {name!r} belongs to {package.distribution}")
        near = get_close_matches(name, self.list_commands(ctx), n=2)
        fix = f"did you mean {' or '.join(near)}?" if near else "list the commands with smalti --help"
        raise UserError(f"unknown command {name!r}", fix=fix)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        texts = {name: text for name, (_, text) in COMMANDS.items()}
        texts |= {name: command.get_short_help_str(80) for name, command in sorted(self._from_plugins().items())}
        named = {name for names in SECTIONS.values() for name in names}
        sections = {**SECTIONS, "From plugins": tuple(name for name in texts if name not in named)}
        width = max(map(len, texts))
        for title, names in sections.items():
            if rows := [(f"{name:<{width}}", texts[name]) for name in names if name in texts]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _from_plugins(self) -> dict[str, click.Command]:
        """The commands of installed plugins. Plugins that the environment disables are not imported."""
        from smalti.hookspecs import HookSpecs
        from smalti.plugins import load_plugins, selection_of

        group = CommandCollector(tuple(COMMANDS))
        plugins = load_plugins(selection_of((), None, os.environ), strict=False)
        for name in sorted(plugins.implementers(HookSpecs.register_commands)):
            try:
                plugins.call_one(name, HookSpecs.register_commands, commands=group)
            except Exception as error:  # noqa: BLE001 - a faulty plugin must not disable the other commands
                click.echo(f"smalti: warning: ignoring the commands of plugin {name!r}: {describe(error)}", err=True)
        return dict(group.commands)


@click.group(cls=Commands, context_settings=_SPELLING, examples=EXAMPLES, epilog="Every command has --help.")
@click.version_option(version("smalti"), prog_name="smalti")
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
    try:
        code = smalti.main(args=arguments, prog_name="smalti", standalone_mode=False, color=colour())
    except UserError as error:
        _print_error(str(error), error)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        click.echo("smalti: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the top level: only the exit code follows
        traceback.print_exc()
        _print_error(f"{type(error).__name__}: {error}", error)
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.DONE


def _print_error(message: str, error: BaseException) -> None:
    """Print the error as the last lines of output, with the plugin that raised it, if any."""
    click.echo(f"{click.style('smalti: error:', fg='red', bold=True)} {message}", err=True, color=colour())
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  {note}", err=True)
