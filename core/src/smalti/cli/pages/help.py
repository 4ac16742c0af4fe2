"""Help on the command line: commands with examples, pages of options, colours, and a pager on terminals.

Colours are always written. `click.echo` removes them if the output is not a terminal, or if NO_COLOR is set (see `colour`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from smalti.config import PREFIX, package_of
from smalti.errors import UserError, did_you_mean
from smalti.hookspecs import HookSpecs
from smalti.plugins import load_plugins
from smalti.system import describe
from smalti.types import CommandCollector

if TYPE_CHECKING:
    from smalti.config import Option, OptionGroup
    from smalti.plugins import Selection

_TERM = 32
"""Columns of an option's flag beside its help; a longer one has a line of its own."""


class Formatter(click.HelpFormatter):
    """Headings in bold, options and commands in colour."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _TERM, col_spacing: int = 2) -> None:
        styled = [(click.style(term, fg="cyan"), _unbroken(text)) for term, text in rows]
        super().write_dl(styled, col_max, col_spacing)

    def write_text(self, text: str) -> None:
        super().write_text(_unbroken(text))

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def _unbroken(text: str) -> str:
    """The text with non-breaking hyphens, so that a flag is not split over two lines."""
    return text.replace("-", _HYPHEN)


def dashed(word: str) -> str:
    """How the words of command lines are compared: in any case, with dashes or underscores."""
    return word.lower().replace("_", "-")


class _Context(click.Context):
    formatter_class = Formatter


class Command(click.Command):
    """A command whose help ends with examples: complete command lines."""

    context_class = _Context

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_examples(formatter, self.examples)


class Group(Command, click.Group):
    """A group of such commands, to which plugins may add others. They are asked only for what is not found here."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._added(ctx).commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(cmd_name) or self._added(ctx).commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if not word.startswith("-") and (command := self.get_command(ctx, word)):
            return word, command, args[1:]  # click would look for it, and so load all plugins, once more
        if word.startswith("-") or self.get_command(ctx, dashed(word)):
            return super().resolve_command(ctx, args)
        name = word if isinstance(self, Root) else f"{self.name} {word}"
        if package := package_of("commands", name):
            raise package.error(f"the command {name!r} belongs to {package.distribution}")
        fix = did_you_mean(word, self.list_commands(ctx), count=2) or f"list the commands with {ctx.command_path} --help"
        raise UserError(f"unknown command {name!r}", fix=fix)

    def _added(self, ctx: click.Context) -> CommandCollector:
        root = ctx.find_root().command
        if not isinstance(root, Root) or root is self:
            return CommandCollector()
        return root.from_plugins(self).below(self.name or "")


class Root(Group):
    """The group of all commands."""

    def from_plugins(self, group: Group | None = None) -> CommandCollector:
        """The commands of all plugins. Plugins that the environment disables are not imported.

        The subcommands of `group` are there before those of plugins, which cannot have their names.
        """
        commands = CommandCollector()
        if group is not None:
            commands.below(group.name or "").commands.update(group.commands)
        plugins = load_plugins(self._selection(), strict=False)
        for name in reversed(plugins.implementers(HookSpecs.register_commands)):
            try:
                plugins.call_one(name, HookSpecs.register_commands, commands=commands)
            except Exception as error:  # noqa: BLE001 - a faulty plugin must not disable the other commands
                click.echo(f"smalti: warning: ignoring the commands of plugin {name!r}: {describe(error)}", err=True)
        return commands

    @staticmethod
    def _selection() -> Selection | None:
        """The plugins that the environment selects. Options, which are slow to import, are needed only for that."""
        if not any(name.startswith(PREFIX) for name in os.environ):
            return None
        from smalti.plugins import selection_of

        return selection_of((), None, os.environ)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in (line for example in examples for line in example.splitlines()):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def write_options(formatter: click.HelpFormatter, options: Mapping[OptionGroup, Sequence[Option]], *, whole: bool) -> None:
    """Write a section for each group; with `whole`, everything about each option."""
    column = min(_TERM, formatter.width // 3)  # on a narrow terminal the texts need the room: long words would be broken
    for group, members in options.items():
        with formatter.section(group.title):
            formatter.write_dl([_entry(option, column, whole=whole) for option in members], column)


def _entry(option: Option, column: int, *, whole: bool) -> tuple[str, str]:
    from smalti.cli.pages.options import facts

    kind, chosen = option.kind.upper(), option.choices
    if chosen:
        kind = "|".join(chosen) if len(f"--{option.name}={'|'.join(chosen)}") <= _TERM else "CHOICE"
    term = f"--[no_]{option.name}" if option.is_flag else f"--{option.name}={kind}"
    return f"{term:<{column}}", " ".join(facts(option, choices=kind == "CHOICE", whole=whole))


# --- terminals ------------------------------------------------------------------------------------------------------


def colour() -> bool | None:
    """The `color` argument for click: False if NO_COLOR is set, else None, so that click checks each stream."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def on_terminal() -> bool:
    """Whether input and output are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def show_page(text: str) -> None:
    """Print a long text, through $PAGER if it does not fit on the terminal. PAGER=cat or an empty PAGER disables the pager."""
    try:
        pager = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:  # unbalanced quotes
        pager = []
    paged = on_terminal() and pager and pager[0] != "cat" and shutil.which(pager[0]) is not None
    if paged and len(text.splitlines()) >= shutil.get_terminal_size().lines:
        click.echo_via_pager(text, color=colour())
    else:
        click.echo(text)
