"""`smalti run goodput`: what the time of a run was spent on. Reads its events only."""

from __future__ import annotations

from pathlib import Path

import click

from smalti import UserError
from smalti.cli import Command, print_table
from smalti.rundir import RunDirectory, to_json
from smalti.system import duration
from smalti_plots.goodput import KINDS, read_goodput


@click.command(cls=Command, examples=("smalti run goodput runs/first", "smalti run goodput runs/first --json"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def goodput(directory: Path, as_json: bool) -> None:
    """Show what the time of a run was spent on, over all its attempts.

    Lost steps are those that were made again after a restart from an older checkpoint. What ended the attempts is listed by
    exit code, with the fault of an accelerator.
    """
    found = read_goodput(RunDirectory(directory))
    if found is None:
        raise UserError(
            f"{directory} has no step whose time was counted: the plugin 'goodput' counts it on the main rank",
            fix="`smalti run ls` lists runs and their status",
        )
    if as_json:
        click.echo(to_json(found.as_json(), indent=2))
        return
    spent = [(KINDS[kind], duration(seconds), f"{seconds / found.total:.1%}") for kind, seconds in found.seconds.items()]
    print_table(("time", "", ""), spent, right=range(1, 3))
    if found.causes:
        click.echo()
        rows = [
            (cause, str(lost.attempts), str(lost.steps), duration(lost.seconds), duration(lost.restarting))
            for cause, lost in found.causes.items()
        ]
        print_table(("ended by", "attempts", "steps made again", "their time", "until the restart"), rows, right=range(1, 5))
