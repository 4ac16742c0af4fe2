"""The contract of the commands that a plugin adds to `smalti`. Imports no torch; the commands run in a process of their own.

It looks at the plugin as it is installed. "commands" is the plugin of smalti's own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import click

from smalti import CommandCollector
from smalti.hookspecs import HookSpecs
from smalti.system import load_json
from smalti_testing.contract import BrokenContract, Contract, expect
from smalti_testing.plugins import PluginSubject, environment_for

UNKNOWN = "--no-such-option"


@dataclass(frozen=True)
class CommandSubject:
    """The commands of one plugin. `refused` are arguments of `smalti` that must be refused, as unknown options are."""

    plugin: str
    refused: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def commands(self) -> dict[tuple[str, ...], click.Command]:
        """As the plugin registers them, by name; those below a group of others by the names of both."""
        own = CommandCollector()
        PluginSubject(self.plugin).answer(HookSpecs.register_commands, commands=own)
        groups = {(): own} | {(name,): group for name, group in own.groups.items()}
        return {(*path, name): each for path, group in groups.items() for name, each in _members(group).items()}

    @cached_property
    def paths(self) -> dict[tuple[str, ...], click.Command]:
        """All commands and those below them, by their full names."""
        found: dict[tuple[str, ...], click.Command] = {}
        rest = list(self.commands.items())
        while rest:
            path, command = rest.pop()
            found[path] = command
            if isinstance(command, click.Group):
                rest += [((*path, name), each) for name, each in _members(command).items()]
        return dict(sorted(found.items()))

    def asked(self) -> dict[str, object]:
        """What `smalti_testing.command_walk` is to call."""
        return {"help": list(self.paths), "refused": [*((*path, UNKNOWN) for path in self.paths), *self.refused]}

    @cached_property
    def seen(self) -> dict[str, object]:
        """What `smalti_testing.command_walk` saw of these commands in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "smalti_testing.command_walk"],
            input=json.dumps(self.asked()),
            env=environment_for(self.plugin),
            capture_output=True,
            text=True,
            timeout=240,
        )
        if done.returncode:
            raise BrokenContract(f"the process that runs the commands ended with status {done.returncode}:\n{done.stderr}")
        return cast(dict[str, object], load_json(done.stdout.splitlines()[-1]))


def _members(group: click.Group) -> dict[str, click.Command]:
    found = {name: group.get_command(click.Context(group), name) for name in group.commands}
    return {name: command for name, command in found.items() if command is not None}


def check_commands(plugin: str, *refused: Sequence[str]) -> None:
    """Every check of the contract, for all commands of this plugin. `refused` are arguments that must be refused."""
    COMMAND.run_all(CommandSubject(plugin, tuple(map(tuple, refused))))


COMMAND: Contract[CommandSubject] = Contract("command")


@COMMAND.check
def commands_are_registered_under_names_that_can_be_typed(subject: CommandSubject) -> None:
    """Lower case, with dashes between words, and no name that smalti or another plugin has.

    `register_commands` gets a group: add each command to it with `add_command`.
    """
    expect(bool(subject.commands), f"the plugin {subject.plugin!r} registers no command")
    wrong = [" ".join(path) for path in subject.paths if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", path[-1])]
    expect(not wrong, f"not in lower case with dashes: {', '.join(wrong)}")


@COMMAND.check
def every_command_says_what_it_does(subject: CommandSubject) -> None:
    """Its docstring is what `--help` shows, and the first sentence what the list of commands shows beside its name."""
    silent = [" ".join(path) for path, command in subject.paths.items() if not command.get_short_help_str().strip()]
    expect(not silent, f"without a docstring: {', '.join(silent)}")


@COMMAND.check
def help_is_shown_without_torch(subject: CommandSubject) -> None:
    """`--help` of every command and subcommand ends with status 0 and imports nothing that takes seconds.

    Import torch, and whatever imports it, inside the function of the command.
    """
    for call, (status, said) in cast(dict[str, tuple[int, str]], subject.seen["help"]).items():
        expect(status == 0 and bool(said.strip()), f"smalti {call} --help ends with status {status}: {said}")
    heavy = cast(list[str], subject.seen["heavy"])
    expect(not heavy, f"showing the help has imported {', '.join(heavy)}")


@COMMAND.check
def what_it_does_not_understand_is_refused_with_exit_code_2(subject: CommandSubject) -> None:
    """Scripts tell a wrong command line, exit code 2, from work that failed, 1. Nothing is done, and no traceback is shown.

    Raise `smalti.UserError` with a fix, or let click complain. A command with unprocessed arguments (`nargs=-1`) has to look at
    all of them.
    """
    for call, (status, said) in cast(dict[str, tuple[int, str]], subject.seen["refused"]).items():
        expect(status == 2, f"smalti {call} ends with status {status}, not 2: {said}")
        expect("Traceback" not in said, f"smalti {call} shows a traceback: {said}")
        expect(bool(said.strip()), f"smalti {call} says nothing")
