"""What a plugin does to a process that only sets up: run as `python -m smalti_testing.start NAME`, it prints a line of JSON.

A process of its own, because earlier imports could not be distinguished from those of the plugin.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence

from smalti import CommandCollector
from smalti.cli import main as smalti
from smalti.config import resolve
from smalti.hookspecs import HookSpecs
from smalti.plugins import load_plugins, schema_of, selection_of
from smalti_testing.plugins import FACTORIES

HEAVY = (
    "torch",
    "accelerate",
    "diffusers",
    "transformers",
    "deepspeed",
    "boto3",
    "botocore",
    "obstore",
    "pynvml",
    "fastapi",
    "pandas",
    "matplotlib",
)
HELP = ("--help", "train --help-all")


def main(name: str) -> None:
    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    config = resolve(schema_of(plugins), environment={"HF_HOME": os.devnull})
    for hook in (HookSpecs.declare_options, *FACTORIES):
        plugins.call_one(name, hook)
    plugins.call_one(name, HookSpecs.register_commands, commands=CommandCollector())
    plugins.call_one(name, HookSpecs.check_config, config=config)
    plugins.call_one(name, HookSpecs.configure_distributed, config=config)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        helped = {arguments: status(arguments.split()) for arguments in HELP}
    warned = "".join(line for line in said.getvalue().splitlines(keepends=True) if "smalti: warning:" in line)
    heavy = [module for module in HEAVY if module in sys.modules]
    print(json.dumps({"heavy": heavy, "help": helped, "said": said.getvalue()[-2000:] if any(helped.values()) else warned}))


def status(arguments: Sequence[str]) -> int:
    """The exit status of `smalti WORDS`."""
    try:
        smalti(list(arguments))
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
