"""`smalti checkpoint export`. Importing this module imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Literal

import click

from smalti import UserError
from smalti.checkpoint import check_new
from smalti.cli import Command, LocalPlace, Place, counted, format_bytes, place_at, progress_bar
from smalti.plugins import load_plugins, selection_of
from smalti.system import parse_bytes

if TYPE_CHECKING:
    from smalti_export.folder import Precision


_HELP = "Folder to create. It must not exist yet."


def _file_size(text: str) -> int:
    """A number of bytes, such as 10GB (10**10) or 5GiB."""
    try:
        if (size := parse_bytes(text)) < 1:
            raise ValueError(f"{text!r} is too small")
    except ValueError as error:
        raise UserError(f"--max_shard_size: {error}", fix="--max_shard_size=5GB") from None
    return size


def step_or_best(text: str) -> int | Literal["best"]:
    """The value of `--step`. Raises UserError."""
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise UserError(f"--step: {text!r} is not a step", fix="give a number, or best")
    return int(text)


@click.command(
    cls=Command,
    examples=(
        "smalti checkpoint export runs/first --to=model",
        "smalti checkpoint export runs/first --to=model --step=1000 --raw --dtype=bf16",
        "smalti checkpoint export runs/style --to=style-lora --format=comfyui",
        "smalti checkpoint export runs/style --to=style-model --merge",
        "smalti checkpoint export runs/first --to=single --single_file --dtype=bf16",
    ),
)
@click.argument("path", type=place_at)
@click.option("--to", "target", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help=_HELP)
@click.option(
    "--step",
    type=step_or_best,
    metavar="STEP",
    help='Step of the checkpoint, or "best": the one with the best evaluation. Default: the newest one that is intact.',
)
@click.option(
    "--ema/--raw",
    "averaged",
    default=None,
    help="Export the EMA weights, or those of the last step. Default: as in validation, the EMA weights if there are any.",
)
@click.option(
    "--format",
    type=click.Choice(("diffusers", "peft", "comfyui", "kohya")),
    help="Format of an adapter. Default: diffusers, or peft for a family that diffusers loads no adapters for.",
)
@click.option("--merge", is_flag=True, help="Export the complete model with the adapter merged into it.")
@click.option(
    "--single_file",
    is_flag=True,
    help="Export the complete model as one file for ComfyUI and the model's own tools. An adapter needs --merge.",
)
@click.option(
    "--dtype",
    "precision",
    type=click.Choice(("fp32", "bf16", "fp16")),
    help="Dtype of the trained model or adapter. Default: unchanged, like all other parts.",
)
@click.option(
    "--max_shard_size",
    "largest_file",
    type=_file_size,
    default="10GB",
    show_default=True,
    metavar="SIZE",
    help="Split the model into files of at most this size, such as 5GB or 500MB.",
)
@click.option(
    "--pretrained_model_name_or_path",
    "pretrained",
    metavar="FOLDER",
    help="New path of the model that the run started from, if it has moved.",
)
@click.option(
    "--base_pipeline",
    metavar="FOLDER",
    help="New path of the run's --base_pipeline, if it has moved.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(
    path: Place,
    target: Path,
    step: int | Literal["best"] | None,
    averaged: bool | None,
    format: str | None,
    merge: bool,
    single_file: bool,
    precision: Precision | None,
    largest_file: int,
    pretrained: str | None,
    base_pipeline: str | None,
    as_json: bool,
) -> None:
    """Export a run or checkpoint for inference.

    PATH is a run directory or one of its checkpoints, or its URL: what is needed is downloaded beside FOLDER, and removed at
    the end. The model family decides what is written: a complete pipeline, or an adapter file. Works for any strategy and
    number of ranks, without an accelerator, with one tensor in memory at a time.

    The checkpoint is verified first, and the export is read back before it appears under its name.
    """
    from smalti.checkpoint import ExportRequest
    from smalti_export.inference_export import export as export_run

    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    groups = ("model",) if averaged is False else ("model", "ema")
    with _exported(path, target, groups, step) as source, progress_bar(f"exporting {path.name}") as progress:
        done = export_run(
            source,
            target,
            plugins,
            step=step if isinstance(path, LocalPlace) else None,
            averaged=averaged,
            precision=precision,
            pretrained=pretrained,
            base_pipeline=base_pipeline,
            request=ExportRequest(format=format, merge=merge, single_file=single_file, largest_file=largest_file),
            report=lambda sentence: click.echo(sentence, err=True),
            progress=progress,
        )
    if as_json:
        usages = [vars(usage) for usage in done.usages]
        shown = str(done.checkpoint) if isinstance(path, LocalPlace) else path.url_of(done.checkpoint.name)
        listing = vars(done) | {"path": str(done.path), "checkpoint": shown, "usages": usages}
        click.echo(json.dumps(listing, indent=2, ensure_ascii=False))
        return
    what = f"{counted(done.tensors, 'averaged tensor' if done.averaged else 'trained tensor')}, {format_bytes(done.size)}"
    click.echo(f"{done.path}: {done.family} at step {done.step}, {what} in {counted(len(done.files), 'file')}, verified")
    for usage in done.usages:
        click.echo(f"\n{usage.tool}:\n{indent(usage.text, '    ')}")


@contextmanager
def _exported(place: Place, target: Path, groups: Collection[str], step: int | Literal["best"] | None) -> Iterator[Path]:
    """The run or checkpoint to export."""
    if isinstance(place, LocalPlace):
        yield place.path
    else:
        check_new(target)
        with place.downloaded(target, groups, step=step) as path:
            yield path
