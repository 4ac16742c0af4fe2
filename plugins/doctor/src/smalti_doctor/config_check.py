"""The checks of a configuration before a launch: `smalti config check`, and as JSON for `smalti doctor`.

`smalti doctor` runs `python -m smalti_doctor.config_check [CONFIG] [--OPTION=VALUE]...` as a child process. It prints
{"problems": [{"message", "where", "fix", "option"}], "unchecked": MODEL}, and writes nothing. Imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import click

from smalti import Config, ConfigError, InvalidOptionError, Problem, UserError, problems_in
from smalti.cli import Command, CommandLine
from smalti.config import ModelOptions
from smalti.data import check_sources
from smalti.launch import check_accelerators, find_problems
from smalti.parallel import accelerator_kind
from smalti.plugins import Plugins, family_entry
from smalti.system import die_with_parent


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    examples=("smalti config check config.toml", "smalti config check config.toml --num_processes=8 --json"),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(arguments: tuple[str, ...], as_json: bool) -> None:
    """Check a configuration: options, datasets, plugins, devices.

    Takes the same arguments as `smalti train`. Reads no image, downloads no weights and writes nothing;
    `smalti train --dry-run` checks more. --json prints every problem with its option.
    """
    command_line = CommandLine.parse(arguments)
    resolved = command_line.draft()
    problems, unchecked = problems_of(resolved, command_line.plugins)
    if as_json:
        found = {"problems": [each.as_json() for each in problems], "unchecked": unchecked, "notices": list(resolved.notices)}
        click.echo(json.dumps(found, indent=2))
    if problems:
        raise ConfigError(problems)
    if not as_json:
        for notice in resolved.notices:
            click.echo(f"smalti: note: {notice}", err=True)
        left = f"; {unchecked} was not checked, because it may have to be downloaded" if unchecked else ""
        click.echo(f"no problem found{left}")


def problems_of(config: Config, plugins: Plugins) -> tuple[list[Problem], str]:
    """Of the options; and if there are none, of the datasets and their storages, and of the number of devices.

    The second value is a model that was not checked, because its weights may have to be downloaded.
    """
    found, unchecked = find_problems(config, plugins), _to_download(config, plugins)
    if not found:
        found = _collected(
            [lambda: check_sources(config, plugins), lambda: check_accelerators(config, accelerator_kind(config))]
        )
    return found, unchecked


def _to_download(config: Config, plugins: Plugins) -> str:
    """The model for which weights may have to be downloaded; "" for none, and where options are invalid."""
    with suppress(InvalidOptionError, UserError):
        options = config[ModelOptions]
        start = options.pretrained_model_name_or_path or str(options.model_family)
        if family_entry(config, plugins).downloads and not Path(start).expanduser().is_dir():
            return start
    return ""


def _collected(checks: Sequence[Callable[[], object]]) -> list[Problem]:
    found: list[Problem] = []
    for each in checks:
        try:
            each()
        except InvalidOptionError:
            continue  # another check reports the option
        except UserError as error:
            found += problems_in(error)
    return found


def main() -> None:
    die_with_parent()
    command_line = CommandLine.parse(sys.argv[1:])
    found, unchecked = problems_of(command_line.draft(), command_line.plugins)
    print(json.dumps({"problems": [each.as_json() for each in found], "unchecked": unchecked}))


if __name__ == "__main__":
    main()
