"""`smalti checkpoint`: list, inspect, verify, convert and export checkpoints. No command changes a checkpoint.

Importing this module imports no torch; only `export` needs it. `verify` exits with 1 if anything is damaged. All commands exit
with 2 if there is no checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, ClassVar, get_args

import click

from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    WEIGHTS,
    CheckpointStore,
    Entry,
    Manifest,
    StoredTensor,
    Target,
    Verification,
    convert,
    read_manifest,
    stored_tensors,
    verify,
)
from smalti.cli.output import counted, format_bytes, print_table
from smalti.cli.pages.help import Group
from smalti.errors import CheckpointError
from smalti.hookspecs import HookSpecs
from smalti.plugins import load_plugins, selection_of

if TYPE_CHECKING:
    from smalti.checkpoint import Precision

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_NEW = click.Path(path_type=Path)


class _Size(click.ParamType[int]):
    """A number of bytes, such as 10GB (10**10) or 5GiB."""

    name = "size"
    _UNITS: ClassVar[Mapping[str, int]] = {
        "": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
    }

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", str(value).strip(), re.IGNORECASE)
        size = int(float(match[1]) * self._UNITS[(match[2] or "").upper()]) if match else 0
        if size < 1:
            self.fail(f"{value!r} is not a size; give one such as 10GB, 5GiB or 500MB", param, ctx)
        return size


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
    """List, inspect, verify, convert and export checkpoints."""


@checkpoint.command("ls", examples=("smalti checkpoint ls runs/first",))
@click.argument("run_dir", type=_DIRECTORY)
@_as_json
def list_checkpoints(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of RUN_DIR. Reads only their manifests; `verify` reads everything."""
    entries = _entries(run_dir)
    if as_json:
        _print_json([_entry_as_json(entry) for entry in entries])
        return
    rows = [
        (entry.path.name, format_bytes(m.size), str(m.world_size), m.created, ", ".join(m.flags))
        if (m := entry.manifest)
        else (entry.path.name, "", "", "", f"not usable: {entry.problem}")
        for entry in entries
    ]
    print_table(("checkpoint", "size", "ranks", "made", ""), rows, right=(1, 2))


@checkpoint.command(
    "inspect",
    examples=(
        "smalti checkpoint inspect runs/first",
        "smalti checkpoint inspect runs/first/checkpoints/step-00001000 --tensors",
    ),
)
@click.argument("path", type=_DIRECTORY)
@click.option("--tensors", is_flag=True, help="List every tensor with its shape.")
@_as_json
@click.pass_context
def inspect_checkpoint(context: click.Context, path: Path, tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint contains. PATH is a checkpoint, or a run directory (its newest). Contents are not verified."""
    path = _one(path)
    try:
        manifest = read_manifest(path)
        groups = {group: found for group in (*GROUPS, WEIGHTS) if (found := stored_tensors(path / group))}
    except CheckpointError as error:
        click.echo(f"{path}: {error.message}", err=True)
        context.exit(1)
    if as_json:
        _print_json(_manifest_as_json(path, manifest) | {"groups": _groups_as_json(groups, tensors)})
        return
    facts = {
        "checkpoint": str(path),
        "step": str(manifest.step),
        "made": f"{manifest.created} by {counted(manifest.world_size, 'rank')}",
        "size": f"{format_bytes(manifest.size)} in {counted(len(manifest.files), 'file')}",
        "config": manifest.config_digest,
        "plugins": ", ".join(manifest.plugins),
        "flags": ", ".join(manifest.flags),
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<12}{value}")
    for group, found in groups.items():
        elements = sum(tensor.elements for tensor in found.values())
        click.echo(
            f"\n{group}: {counted(len(found), 'tensor')}, {elements:,} elements, {format_bytes(_size(found))}, {_types(found)}"
        )
        if tensors:
            rows = [(name, t.dtype, str(list(t.shape)), format_bytes(t.size)) for name, t in found.items()]
            print_table(("name", "type", "shape", "size"), rows, right=(3,))


@checkpoint.command("verify", examples=("smalti checkpoint verify runs/first", "smalti checkpoint verify runs/first --json"))
@click.argument("path", type=_DIRECTORY)
@_as_json
@click.pass_context
def verify_checkpoints(context: click.Context, path: Path, as_json: bool) -> None:
    """Verify every byte against the digests.

    PATH is a checkpoint, or a run directory (verifies all of them). Exits with 1 if anything is damaged.
    """
    paths = [path] if _is_checkpoint(path) else [entry.path for entry in _entries(path)]
    results = []
    for one in paths:
        results.append(verify(one))
        if not as_json:
            _print_verification(results[-1])
    if as_json:
        _print_json([{"path": str(r.path), "step": r.step, "ok": r.ok, "problems": list(r.problems)} for r in results])
    context.exit(0 if all(result.ok for result in results) else 1)


@checkpoint.command(
    "convert",
    examples=(
        "smalti checkpoint convert deepspeed-run/global_step500 --to=converted",
        "smalti checkpoint convert runs/first --to=weights --format=safetensors --ema",
    ),
)
@click.argument("source", type=_DIRECTORY)
@click.option("--to", "target", required=True, metavar="FOLDER", type=_NEW, help="Folder to create. It must not exist yet.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(Target)),
    default="smalti",
    show_default=True,
    help="smalti: a checkpoint to resume from. safetensors: only the weights, for diffusers and transformers.",
)
@click.option("--ema", is_flag=True, help="Take the EMA weights. Only with --format=safetensors.")
@_as_json
def convert_checkpoint(source: Path, target: Path, kind: Target, ema: bool, as_json: bool) -> None:
    """Convert a checkpoint to smalti's format or to safetensors.

    SOURCE is a checkpoint in any format that an installed plugin reads (see `smalti plugins`), or a run directory (its newest
    checkpoint). It is not changed. Pickles are read in a separate process that cannot run code from them.
    """
    if ema and kind != "safetensors":
        raise click.UsageError("--ema needs --format=safetensors: a checkpoint keeps both weights")
    formats = load_plugins(selection_of((), None, os.environ), strict=False).gather(HookSpecs.register_checkpoint_formats)
    with _progress(f"converting {source.name}") as progress:
        done = convert(_source(source), target, formats, to=kind, use_ema=ema, progress=progress)
    if as_json:
        _print_json(vars(done) | {"path": str(done.path)})
        return
    size = f"{counted(done.tensors, 'tensor')}, {format_bytes(done.size)} in {counted(len(done.files), 'file')}"
    click.echo(f"{done.path}: step {done.step} from {done.source_format}, {size}, verified")
    for notice in done.notices:
        click.echo(f"note: {notice}")
    if kind == "smalti":
        click.echo(f"resume from it with: smalti train ... --resume_from_checkpoint={done.path}")


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
@click.argument("path", type=_DIRECTORY)
@click.option("--to", "target", required=True, metavar="FOLDER", type=_NEW, help="Folder to create. It must not exist yet.")
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint. Default: the newest one that is intact.")
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
    type=_Size(),
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
@_as_json
def export_checkpoint(
    path: Path,
    target: Path,
    step: int | None,
    averaged: bool | None,
    format: str | None,
    merge: bool,
    single_file: bool,
    precision: Precision | None,
    largest_file: int,
    pretrained: str | None,
    as_json: bool,
) -> None:
    """Export a run or checkpoint for inference.

    PATH is a run directory or one of its checkpoints. The model family decides what is written: a complete pipeline, or an
    adapter file. Works for any strategy and number of ranks, without an accelerator, with one tensor in memory at a time.
    The checkpoint is verified first, and the export is read back before it appears under its name.
    """
    from smalti.checkpoint import ExportRequest
    from smalti.training import export

    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    with _progress(f"exporting {path.name}") as progress:
        done = export(
            path,
            target,
            plugins,
            step=step,
            averaged=averaged,
            precision=precision,
            pretrained=pretrained,
            request=ExportRequest(format=format, merge=merge, single_file=single_file, largest_file=largest_file),
            report=lambda sentence: click.echo(sentence, err=True),
            progress=progress,
        )
    if as_json:
        usages = [vars(usage) for usage in done.usages]
        _print_json(vars(done) | {"path": str(done.path), "checkpoint": str(done.checkpoint), "usages": usages})
        return
    what = f"{counted(done.tensors, 'averaged tensor' if done.averaged else 'trained tensor')}, {format_bytes(done.size)}"
    click.echo(f"{done.path}: {done.family} at step {done.step}, {what} in {counted(len(done.files), 'file')}, verified")
    for usage in done.usages:
        click.echo(f"\n{usage.tool}:\n{indent(usage.text, '    ')}")


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal. Yields the function to call with the bytes done and the total."""
    with click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield progress


# --- finding --------------------------------------------------------------------------------------------------------


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or path.name.startswith("step-")


def _entries(path: Path) -> list[Entry]:
    for root in (path / "checkpoints", path):
        if entries := CheckpointStore(root).all():
            return entries
    raise click.BadParameter(f"no checkpoint found in {path}", param_hint="PATH")


def _source(path: Path) -> Path:
    """The checkpoint at `path`; for a run directory, its newest one."""
    return _one(path) if any(CheckpointStore(root).all() for root in (path / "checkpoints", path)) else path


def _one(path: Path) -> Path:
    if _is_checkpoint(path):
        return path
    entries = _entries(path)
    return next((entry.path for entry in reversed(entries) if entry.manifest), entries[-1].path)


# --- showing --------------------------------------------------------------------------------------------------------


def _entry_as_json(entry: Entry) -> dict[str, object]:
    if entry.manifest:
        return _manifest_as_json(entry.path, entry.manifest) | {"problem": ""}
    return {"path": str(entry.path), "step": entry.step, "problem": entry.problem}


def _manifest_as_json(path: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "path": str(path),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "size": manifest.size,
        "plugins": list(manifest.plugins),
        "config_digest": manifest.config_digest,
        "flags": list(manifest.flags),
    }


def _groups_as_json(groups: Mapping[str, Mapping[str, StoredTensor]], tensors: bool) -> dict[str, object]:
    described: dict[str, object] = {}
    for group, found in groups.items():
        summary: dict[str, object] = {
            "tensors": len(found),
            "elements": sum(tensor.elements for tensor in found.values()),
            "size": _size(found),
        }
        if tensors:
            summary["contents"] = {
                name: {"dtype": t.dtype, "shape": list(t.shape), "pieces": t.chunks} for name, t in found.items()
            }
        described[group] = summary
    return described


def _print_verification(result: Verification) -> None:
    if result.ok and result.manifest:
        click.echo(f"{result.path.name}  ok  {format_bytes(result.manifest.size)}")
        return
    click.echo(f"{result.path.name}  DAMAGED")
    for problem in result.problems:
        click.echo(f"    {problem}")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _size(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.size for tensor in tensors.values())


def _types(tensors: Mapping[str, StoredTensor]) -> str:
    types = Counter(tensor.dtype for tensor in tensors.values())
    return ", ".join(dtype for dtype, _ in types.most_common())
