"""`smalti train`: from words to a finished run."""

from __future__ import annotations

import json
from contextlib import ExitStack

import click

from smalti.checks import check_run
from smalti.errors import ExitCode, UserError, problems_in
from smalti.importing import importing
from smalti.invocation import Invocation, take_switch
from smalti.reference import help_text
from smalti.standby import standing_by
from smalti.streams import outlast
from smalti.termination import Stopped, Terminated, terminated

USAGE = """\
Usage: smalti train [CONFIG] [--OPTION=VALUE ...]

Train, or resume. CONFIG is a TOML, JSON or YAML file; flags override it.
Each run has one --output_dir; the same command resumes it.

  smalti train --model_family=toy --instance_data_dir=photos \\
      --output_dir=runs/first --resolution=64 --max_train_steps=1000
  smalti train runs/first/config.toml --max_train_steps=2000

  --help         The options that most runs need.
  --help-all     Every option. --[no_]x is a switch; --no_x turns it off.
  --dry-run      Check everything and show what would be launched.
  --json         With --dry-run: machine-readable output.
"""


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def train(words: tuple[str, ...]) -> int:
    """Train, or resume."""
    rest = list(words)
    everything, some = take_switch(rest, "--help-all"), take_switch(rest, "--help", "-h")
    dry_run, as_json = take_switch(rest, "--dry-run"), take_switch(rest, "--json")
    try:
        invocation = Invocation.read(rest)
        if everything or some:
            click.echo(USAGE + help_text(invocation.schema, everything=everything))
            return 0
        return _train(invocation, dry_run=dry_run, as_json=as_json)
    except UserError as error:
        if as_json:
            problems = [problem.as_json() for problem in problems_in(error)]
            click.echo(json.dumps({"problems": problems, "exit_code": int(error.exit_code)}, indent=2))
        raise


def _train(invocation: Invocation, *, dry_run: bool, as_json: bool) -> int:
    config = invocation.draft()
    if config.problems:
        check_run(config, invocation.plugins)  # raises, with what else is wrong
    try:
        with terminated(), ExitStack() as closing:
            standby = None if dry_run else closing.enter_context(standing_by(config))
            with importing():
                from smalti.preparation import Preparation  # imports much, so only once the options are right

            preparation = Preparation.of(config, invocation.plugins, write=not dry_run)
            if not dry_run:
                outlast()
                return int(preparation.launch(standby))
    except Stopped:
        click.echo("smalti: stopped on request before the first step; the same command begins it", err=True)
        return int(ExitCode.DONE)
    except Terminated:
        click.echo("smalti: stopped before the run began; the same command begins it", err=True)
        return int(ExitCode.PREEMPTED)
    click.echo(json.dumps(preparation.describe(), indent=2) if as_json else preparation.as_text())
    return 0
