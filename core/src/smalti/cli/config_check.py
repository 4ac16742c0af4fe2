"""The checks of a configuration before a launch, as JSON.

`smalti doctor` runs `python -m smalti.cli.config_check [CONFIG] [--OPTION=VALUE]...` as a child process. It prints
{"problems": [{"message", "where", "fix", "option"}], "unchecked": MODEL}, and writes nothing.
`smalti config check` makes the same checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from smalti.cli.arguments import CommandLine
from smalti.config import Config
from smalti.data import check_sources
from smalti.errors import InvalidOptionError, Problem, UserError, problems_in
from smalti.launch import check_accelerators, find_problems
from smalti.parallel import accelerator_kind
from smalti.plugins import Plugins
from smalti.system import die_with_parent


def problems(arguments: Sequence[str]) -> tuple[list[Problem], str]:
    """Of the options; and if there are none, of the datasets and their storages, and of the number of devices.

    The second value is a model that was not checked, because its weights may have to be downloaded.
    """
    command_line = CommandLine.parse(arguments)
    return problems_of(command_line.draft(), command_line.plugins)


def problems_of(config: Config, plugins: Plugins) -> tuple[list[Problem], str]:
    """The same for a configuration that has been read."""
    found, unchecked = find_problems(config, plugins)
    if not found:
        found = _collected(
            [lambda: check_sources(config, plugins), lambda: check_accelerators(config, accelerator_kind(config))]
        )
    return found, unchecked


def _collected(checks: Sequence[Callable[[], object]]) -> list[Problem]:
    found: list[Problem] = []
    for check in checks:
        try:
            check()
        except InvalidOptionError:
            continue  # another check reports the option
        except UserError as error:
            found += problems_in(error)
    return found


def main() -> None:
    die_with_parent()
    found, unchecked = problems(sys.argv[1:])
    print(json.dumps({"problems": [each.as_json() for each in found], "unchecked": unchecked}))


if __name__ == "__main__":
    main()
