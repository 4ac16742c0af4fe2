"""`smalti hub push`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from smalti.cli import Command, Group, counted
from smalti_export.command import step_or_best


@click.group(cls=Group, examples=("smalti hub push runs/style --to USER/NAME",))
def hub() -> None:
    """Publish results on the Hugging Face Hub."""


@hub.command(
    "push",
    cls=Command,
    examples=(
        "smalti hub push runs/style --to USER/NAME",
        "smalti hub push runs/style --to USER/NAME --step=1000 --format=comfyui",
        "smalti hub push style-lora --to USER/NAME --public",
    ),
)
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "repository", metavar="REPOSITORY", help="USER/NAME, or NAME. Default: the name of the folder.")
@click.option(
    "--step",
    type=step_or_best,
    metavar="STEP",
    help='Step of the checkpoint, or "best": the one with the best evaluation. Default: the newest one that is intact.',
)
@click.option("--ema/--raw", "averaged", default=None, help="As in `smalti checkpoint export`.")
@click.option(
    "--format",
    type=click.Choice(("diffusers", "peft", "comfyui", "kohya")),
    help="As in `smalti checkpoint export`.",
)
@click.option("--public", is_flag=True, help="Create a public repository. An existing one stays as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def push(
    path: Path,
    repository: str | None,
    step: int | Literal["best"] | None,
    averaged: bool | None,
    format: str | None,
    public: bool,
    as_json: bool,
) -> None:
    """Upload a run or an export to the Hub.

    PATH is a run directory, one of its checkpoints, or a folder from `smalti checkpoint export`. A checkpoint is exported
    first. The repository is created if it is not there, as a private one. Files that the Hub has are not sent again, so the
    same command continues an interrupted upload. Nothing is removed from the Hub, and a model card that you wrote is kept.
    """
    from smalti_hub.publish import Choice, publish

    done = publish(
        path,
        repository,
        Choice(step=step, averaged=averaged, format=format),
        private=not public,
        report=lambda sentence: click.echo(sentence, err=True),
    )
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    click.echo(f"{done.url}: {counted(len(done.files), 'file')} in {done.repository}")
    if done.card_kept:
        click.echo("the model card on the Hub was kept, because smalti did not write it", err=True)
