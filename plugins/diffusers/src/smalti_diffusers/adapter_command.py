"""`smalti adapter`. Imports no torch until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smalti import UserError
from smalti.cli import Command, Group, counted

if TYPE_CHECKING:
    from smalti_diffusers.lora.workshop import AdaptedModel, HeldAdapter

_FILE = click.Path(exists=True, path_type=Path)
_MODEL = click.option(
    "--model", metavar="MODEL", help="Family, or folder of the pipeline, that FILE is for. Default: found by its layers."
)
_TO = click.option("--to", "target", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Folder to create.")
_FORMAT = click.option(
    "--format", type=click.Choice(("diffusers", "peft", "comfyui", "kohya")), help="As in `smalti checkpoint export`."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, examples=("smalti adapter check style.safetensors",))
def adapter() -> None:
    """Check, convert, merge and resize files of adapters, and extract them from complete models."""


@adapter.command("check", cls=Command, examples=("smalti adapter check style.safetensors",))
@click.argument("file", type=_FILE)
@_MODEL
@_JSON
def check(file: Path, model: str | None, as_json: bool) -> None:
    """Show the kind of an adapter, its model, and which tools read it.

    FILE is a safetensors file in any format. A tool that reads it at another strength than the one it was trained at is named.
    """
    from smalti_diffusers.lora.encoders import encoder_of
    from smalti_diffusers.lora.readers import readers
    from smalti_diffusers.lora.workshop import opened
    from smalti_diffusers.options import TITLES

    found, place = opened(file, model)
    header = found.header
    said = {
        "file": str(header.path),
        "kind": header.kind,
        "family": place.family,
        "model": place.source,
        "layers": len(found.layers),
        "rank": header.rank,
        "alpha": header.alpha,
        "text_encoder_layers": header.text_layers,
        "tlora": header.timed,
        "tools": readers(header, place.family),
    }
    if as_json:
        click.echo(json.dumps(said, indent=2, ensure_ascii=False))
        return
    rank = "of full matrices" if header.rank is None else f"of rank {header.rank}, alpha {header.alpha:g}"
    click.echo(f"{header.path}: {TITLES[header.kind]} {rank}, {counted(len(found.layers), 'layer')} of {place.source}")
    if header.text_layers and not any(map(encoder_of, found.layers)):
        click.echo(f"note: {counted(header.text_layers, 'layer')} of text encoders, which smalti does not use")
    if header.timed is not None:
        click.echo("note: a T-LoRA, whose ranks follow the noise level in smalti; other tools use all of them always")
    for tool, answer in readers(header, place.family).items():
        click.echo(f"{tool:<10} {answer}")


@adapter.command("convert", cls=Command, examples=("smalti adapter convert style.safetensors --to style-kohya --format=kohya",))
@click.argument("file", type=_FILE)
@_TO
@_FORMAT
@_MODEL
@_JSON
def convert(file: Path, target: Path, format: str | None, model: str | None, as_json: bool) -> None:
    """Write an adapter in the format of another tool. Nothing is approximated."""
    from smalti_diffusers.lora.workshop import held, opened

    found, place = opened(file, model)
    _write(held(found), place, target, format, as_json=as_json)


@adapter.command("merge", cls=Command, examples=("smalti adapter merge cat.safetensors oil.safetensors --to both",))
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@_TO
@click.option("--strength", "strengths", multiple=True, type=float, help="Strength of each FILE, in their order. Default: 1.")
@_FORMAT
@_MODEL
@_JSON
def merge(
    files: tuple[Path, ...],
    target: Path,
    strengths: tuple[float, ...],
    format: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Make one LoRA of several for the same model.

    Its rank is the sum of their ranks. Nothing is approximated; `smalti adapter resize` makes it smaller.
    """
    from smalti_diffusers.lora.workshop import held, merged, opened

    if strengths and len(strengths) != len(files):
        raise UserError(
            f"{counted(len(strengths), 'strength')} for {counted(len(files), 'file')}", fix="give --strength once for each FILE"
        )
    found, place = opened(files[0], model)
    others = [held(opened(each, model or place.family)[0]) for each in files[1:]]
    _write(merged([held(found), *others], strengths or [1.0] * len(files)), place, target, format, as_json=as_json)


@adapter.command("resize", cls=Command, examples=("smalti adapter resize style.safetensors --rank=8 --to style-8",))
@click.argument("file", type=_FILE)
@click.option("--rank", required=True, type=click.IntRange(min=1), help="Largest rank of a layer.")
@_TO
@_FORMAT
@_MODEL
@_JSON
def resize(file: Path, rank: int, target: Path, format: str | None, model: str | None, as_json: bool) -> None:
    """Make a LoRA of a lower rank, or a LoRA of a LoKr or LoHa.

    It changes the weights as nearly as that rank can.
    """
    from smalti_diffusers.lora.workshop import held, opened, resized

    found, place = opened(file, model)
    smaller, kept = resized(held(found), rank, place.model)
    _write(smaller, place, target, format, as_json=as_json, kept=kept)
    if not as_json:
        click.echo(f"kept {kept:.2%} of the squared change of the weights")


@adapter.command("extract", cls=Command, examples=("smalti adapter extract tuned --base=pipeline --rank=32 --to style",))
@click.argument("full", metavar="FULL")
@click.option("--base", required=True, metavar="PIPELINE", help="Pipeline that FULL was trained from, a folder or Hub id.")
@click.option("--rank", required=True, type=click.IntRange(min=1), help="Largest rank of a layer.")
@click.option(
    "--energy",
    default=1.0,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the squared change of a layer that its rank has to keep. Default: 1, the largest rank.",
)
@click.option("--targets", default="", metavar="NAME,...", help="Layers, as in --lora_targets. Default: all that changed.")
@click.option("--device", default="cpu", metavar="DEVICE", help="Where to compute, such as cuda. Default: cpu.")
@_TO
@_FORMAT
@_JSON
def extract(
    full: str,
    base: str,
    rank: int,
    energy: float,
    targets: str,
    device: str,
    target: Path,
    format: str | None,
    as_json: bool,
) -> None:
    """Make a LoRA of what a complete training has changed.

    FULL is a pipeline, a transformer folder or a single file. One weight is in memory at a time. The error is the norm of what
    the LoRA lacks over the norm of the change, by layers. Changes of biases, norms and text encoders are in no LoRA: they are
    listed.
    """
    from smalti.checkpoint import check_new
    from smalti_diffusers.lora.extraction import changed_encoders, extracted, two_models

    check_new(target)
    place, changed, weights = two_models(full, base)
    chosen = [name for name in targets.split(",") if name]
    found = extracted(place, changed, weights, rank=rank, energy=energy, targets=chosen, device=device)
    encoders = changed_encoders(full, base)
    more = {"error": found.error, "errors": found.errors, "left": found.left, "text_encoders": list(encoders)}
    _write(found.adapter, place, target, format, as_json=as_json, **more)
    if as_json:
        return
    width = max(map(len, found.errors))
    for layer, error in found.errors.items():
        click.echo(f"  {layer:<{width}}  {error:.2%} of the change is missing")
    click.echo(f"{found.error:.2%} of the change of all these layers is missing")
    if found.left:
        most = max(found.left, key=lambda name: found.left[name])
        click.echo(f"note: {counted(len(found.left), 'other tensor')} changed too, most of all {most}")
    if encoders:
        click.echo(f"note: {' and '.join(encoders)} changed too, which the adapter lacks: use it with those of {full}")


def _write(
    adapter: HeldAdapter, place: AdaptedModel, target: Path, format: str | None, *, as_json: bool, **more: object
) -> None:
    """Write a folder with the adapter, and show what it is; as JSON with `more`."""
    from smalti_diffusers.lora.workshop import write
    from smalti_diffusers.options import TITLES

    files = write(adapter, place, target, format)
    if as_json:
        shown = {"files": [str(each) for each in files], "kind": adapter.kind, "rank": adapter.rank, **more}
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"{files[0]}: {TITLES[adapter.kind]} of {counted(len(adapter.layers), 'layer')} of {place.source}")
