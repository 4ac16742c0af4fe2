"""`smalti run report`: what the evaluations of a run say. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from smalti.cli import Command, counted, print_table
from smalti.rundir import RunDirectory, to_json
from smalti_validation.overfitting import Level, read_report

_SHOWN = 10
"""Images in the table; the JSON has all."""


@click.command(cls=Command, examples=("smalti run report runs/first", "smalti run report runs/first --json"))
@click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all images.")
def report(directory: Path, as_json: bool) -> None:
    """Show which noise levels overfit, and which held-out images improve least.

    A level overfits if its loss has clearly risen since its best step: by more than the 95 % confidence interval of the
    difference, image by image.
    """
    found = read_report(RunDirectory(directory))
    if as_json:
        levels = [asdict(level) | {"overfits": level.overfits} for level in found.levels]
        click.echo(to_json(asdict(found) | {"levels": levels, "worse": found.worse}, indent=2))
        return
    click.echo(f"{counted(len(found.images), 'held-out image')}, steps {found.first} to {found.last}")
    rows = [
        (str(level.timestep), str(level.best), f"{level.best_loss:.4g}", f"{level.last_loss:.4g}", _change(level))
        for level in found.levels
    ]
    print_table(("timestep", "best at step", "its loss", "last loss", ""), rows, right=range(4))
    click.echo(f"\n{counted(found.worse, 'image')} of {len(found.images)} with a higher loss than at step {found.first}")
    least = [(image.name, f"{image.first:.4g}", f"{image.last:.4g}") for image in found.images[:_SHOWN]]
    print_table(("improved least", "first loss", "last loss"), least, right=(1, 2))


def _change(level: Level) -> str:
    if level.change is None:
        return ""
    interval = "" if level.change.interval is None else f" (95 %: +-{level.change.interval:.2g})"
    return f"{level.change.loss:+.2g}{interval}{', overfits' if level.overfits else ''}"
