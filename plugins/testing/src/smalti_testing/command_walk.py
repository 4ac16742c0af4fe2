"""Commands in a process of their own: `python -m smalti_testing.command_walk` reads and prints a line of JSON.

It is given commands to call with `--help`, and arguments that are to be refused. It reports how each ended, what it printed,
and which large libraries the help has imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence

from smalti_testing.start import HEAVY, status


def main() -> None:
    asked = json.load(sys.stdin)
    helped = {" ".join(arguments): _called([*arguments, "--help"]) for arguments in asked["help"]}
    heavy = [module for module in HEAVY if module in sys.modules]
    refused = {" ".join(arguments): _called(arguments) for arguments in asked["refused"]}
    print(json.dumps({"help": helped, "heavy": heavy, "refused": refused}))


def _called(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status of `smalti WORDS`, and the end of what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = status(arguments)
    return code, said.getvalue()[-2000:]


if __name__ == "__main__":
    main()
