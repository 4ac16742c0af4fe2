"""`smalti checkpoint`: list, verify and export checkpoints. No command changes a checkpoint.

Importing this module imports no torch; only `export` needs it. `verify` exits with 1 if anything is damaged. All commands exit
with 2 if there is no checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Literal

import click

from smalti.checkpoint import ListedCheckpoint, Manifest, check_new
from smalti.cli.output import counted, format_bytes, print_table, progress_bar
from smalti.cli.pages.help import Group
from smalti.cli.places import LocalPlace, Place, place_at
from smalti.errors import UserError
from smalti.plugins import load_plugins, selection_of
from smalti.system import parse_bytes

if TYPE_CHECKING:
    from smalti.checkpoint import Precision

_NEW = click.Path(path_type=Path)


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


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(
    "checkpoint",
    cls=Group,
    examples=(
        "smalti checkpoint ls runs/first",
        "smalti checkpoint verify runs/first",
        "smalti checkpoint export runs/first --to=model",
    ),
)
def checkpoint() -> None:
    """List, verify and export checkpoints."""


@checkpoint.command("ls", examples=("smalti checkpoint ls runs/first",))
@click.argument("run_dir", type=place_at)
@_as_json
def list_checkpoints(run_dir: Place, as_json: bool) -> None:
    """List the checkpoints of RUN_DIR, a folder or URL. Reads only their manifests; `verify` reads everything."""
    found, best = run_dir.checkpoints(), run_dir.best()
    if as_json:
        _print_json([_listed_as_json(each) | {"best": each.name == best} for each in found])
        return
    rows = [
        (each.name, format_bytes(m.size), str(m.world_size), m.created, ", ".join(("best",) * (each.name == best) + m.flags))
        if (m := each.manifest)
        else (each.name, "", "", "", f"not usable: {each.problem}")
        for each in found
    ]
    print_table(("checkpoint", "size", "ranks", "made", ""), rows, right=(1, 2))


@checkpoint.command("verify", examples=("smalti checkpoint verify runs/first", "smalti checkpoint verify runs/first --json"))
@click.argument("path", type=place_at)
@_as_json
@click.pass_context
def verify_checkpoints(context: click.Context, path: Place, as_json: bool) -> None:
    """Verify every byte against the digests.

    PATH is the path or URL of a checkpoint, or of a run directory (verifies all of them). What is behind a URL is read and not
    stored. Exits with 1 if anything is damaged.
    """
    results: list[dict[str, object]] = []
    for each in path.checkpoints():
        problems = path.problems(each)
        step = each.manifest.step if each.manifest else None
        results.append({"path": each.path, "step": step, "ok": not problems, "problems": list(problems)})
        if not as_json:
            _print_verification(each, problems)
    if as_json:
        _print_json(results)
    context.exit(0 if all(result["ok"] for result in results) else 1)


@checkpoint.command(
    "export",
    examples=(
        "smalti checkpoint export runs/first --to=model",
        "smalti checkpoint export runs/first --to=model --step=1000 --raw --dtype=bf16",
        "smalti checkpoint export runs/style --to=style-lora --format=comfyui",
        "smalti checkpoint export runs/style --to=style-model --merge",
        "smalti checkpoint export runs/first --to=single --single_file --dtype=bf16",
    ),
)
@click.argument("path", type=place_at)
@click.option("--to", "target", required=True, metavar="FOLDER", type=_NEW, help="Folder to create. It must not exist yet.")
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
@_as_json
def export_checkpoint(
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
    from smalti.training import export

    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    groups = ("model",) if averaged is False else ("model", "ema")
    with _exported(path, target, groups, step) as source, progress_bar(f"exporting {path.name}") as progress:
        done = export(
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
        _print_json(vars(done) | {"path": str(done.path), "checkpoint": shown, "usages": usages})
        return
    what = f"{counted(done.tensors, 'averaged tensor' if done.averaged else 'trained tensor')}, {format_bytes(done.size)}"
    click.echo(f"{done.path}: {done.family} at step {done.step}, {what} in {counted(len(done.files), 'file')}, verified")
    for usage in done.usages:
        click.echo(f"\n{usage.tool}:\n{indent(usage.text, '    ')}")


# --- finding --------------------------------------------------------------------------------------------------------


@contextmanager
def _exported(place: Place, target: Path, groups: Collection[str], step: int | Literal["best"] | None) -> Iterator[Path]:
    """The run or checkpoint to export."""
    if isinstance(place, LocalPlace):
        yield place.path
    else:
        check_new(target)
        with place.downloaded(target, groups, step=step) as path:
            yield path


# --- showing --------------------------------------------------------------------------------------------------------


def _listed_as_json(each: ListedCheckpoint) -> dict[str, object]:
    if each.manifest:
        return _manifest_as_json(each.path, each.manifest) | {"problem": ""}
    return {"path": each.path, "step": each.step, "problem": each.problem}


def _manifest_as_json(path: str, manifest: Manifest) -> dict[str, object]:
    fields = {name: value for name, value in vars(manifest).items() if name != "files"}
    return {"path": path, "size": manifest.size, **fields}


def _print_verification(each: ListedCheckpoint, problems: Sequence[str]) -> None:
    if each.manifest and not problems:
        click.echo(f"{each.name}  ok  {format_bytes(each.manifest.size)}")
        return
    click.echo(f"{each.name}  DAMAGED")
    for problem in problems:
        click.echo(f"    {problem}")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
