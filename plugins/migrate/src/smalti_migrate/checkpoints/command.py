"""`smalti checkpoint convert`. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import click

from smalti import UserError
from smalti.checkpoint import CheckpointStore, check_new
from smalti.cli import Command, LocalPlace, Place, counted, format_bytes, place_at, progress_bar
from smalti.hookspecs import HookSpecs
from smalti.plugins import load_plugins, selection_of
from smalti_migrate.checkpoints import convert as converting

_HELP = "Folder to create. It must not exist yet."


@click.command(
    cls=Command,
    examples=(
        "smalti checkpoint convert deepspeed-run/global_step500 --to=converted",
        "smalti checkpoint convert runs/first --to=weights --format=safetensors --ema",
    ),
)
@click.argument("source", type=place_at)
@click.option("--to", "target", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help=_HELP)
@click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(converting.Target)),
    default="smalti",
    show_default=True,
    help="smalti: a checkpoint to resume from. safetensors: only the weights, for diffusers and transformers.",
)
@click.option("--ema", is_flag=True, help="Take the EMA weights. Only with --format=safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def convert(source: Place, target: Path, kind: converting.Target, ema: bool, as_json: bool) -> None:
    """Convert a checkpoint to smalti's format or to safetensors.

    SOURCE is a checkpoint in any format that an installed plugin reads (see `smalti plugins`), or a run directory (its newest
    checkpoint). It is not changed. Pickles are read in a separate process that cannot run code from them. From a URL, the files
    that are needed are downloaded beside FOLDER, verified, and removed at the end.
    """
    if ema and kind != "safetensors":
        raise UserError("--ema needs --format=safetensors: a checkpoint keeps both weights", fix="--format=safetensors")
    formats = load_plugins(selection_of((), None, os.environ), strict=False).gather(HookSpecs.register_checkpoint_formats)
    groups = None if kind == "smalti" else ("ema",) if ema else ("model",)
    with _opened(source, target, groups) as path, progress_bar(f"converting {source.name}") as progress:
        done = converting.convert(path, target, formats, to=kind, use_ema=ema, progress=progress)
    if as_json:
        click.echo(json.dumps(vars(done) | {"path": str(done.path)}, indent=2, ensure_ascii=False))
        return
    size = f"{counted(done.tensors, 'tensor')}, {format_bytes(done.size)} in {counted(len(done.files), 'file')}"
    click.echo(f"{done.path}: step {done.step} from {done.source_format}, {size}, verified")
    for notice in done.notices:
        click.echo(f"note: {notice}")
    if kind == "smalti":
        click.echo(f"resume from it with: smalti train ... --resume_from_checkpoint={done.path}")


@contextmanager
def _opened(place: Place, target: Path, groups: Collection[str] | None) -> Iterator[Path]:
    """The checkpoint at a place; for a run directory, its newest one. In a folder it may be one of another trainer."""
    if isinstance(place, LocalPlace):
        has_own = any(CheckpointStore(root).all() for root in (place.path / "checkpoints", place.path))
        yield Path(place.newest().path) if has_own else place.path
    else:
        check_new(target)
        with place.downloaded(target, groups) as path:
            yield path
