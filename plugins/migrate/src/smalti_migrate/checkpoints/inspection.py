"""`smalti checkpoint inspect`. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import cast

import click

from smalti import CheckpointError
from smalti.checkpoint import StoredTensor
from smalti.cli import Command, Place, counted, format_bytes, place_at, print_table


@click.command(
    cls=Command,
    examples=(
        "smalti checkpoint inspect runs/first",
        "smalti checkpoint inspect runs/first/checkpoints/step-00001000 --tensors",
    ),
)
@click.argument("path", type=place_at)
@click.option("--tensors", is_flag=True, help="List every tensor with its shape.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Place, tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint contains.

    PATH is the path or URL of a checkpoint, or of a run directory (its newest). Contents are not verified.
    """
    found = path.newest()
    if (manifest := found.manifest) is None:
        raise CheckpointError(f"{found.path}: {found.problem}", fix="give another checkpoint of the run, or its directory")
    groups = path.tensors(found)
    made_with = cast(Mapping[str, str], path.state(found).trainer.get("made_with", {}))
    if as_json:
        fields = {name: value for name, value in vars(manifest).items() if name != "files"}
        described = {"path": found.path, "size": manifest.size, **fields, "made_with": made_with}
        click.echo(json.dumps(described | {"groups": _as_json(groups, tensors)}, indent=2, ensure_ascii=False))
        return
    facts = {
        "checkpoint": found.path,
        "step": str(manifest.step),
        "made": f"{manifest.created} by {counted(manifest.world_size, 'rank')}",
        "size": f"{format_bytes(manifest.size)} in {counted(len(manifest.files), 'file')}",
        **{name.replace("_", " "): value for name, value in made_with.items()},
        "config": manifest.config_digest,
        "plugins": ", ".join(manifest.plugins),
        "flags": ", ".join(manifest.flags),
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<12}{value}")
    for group, stored in groups.items():
        size = f"{_elements(stored):,} elements, {format_bytes(_size(stored))}"
        click.echo(f"\n{group}: {counted(len(stored), 'tensor')}, {size}, {_types(stored)}")
        if tensors:
            rows = [(name, t.dtype, str(list(t.shape)), format_bytes(t.size)) for name, t in stored.items()]
            print_table(("name", "type", "shape", "size"), rows, right=(3,))


def _as_json(groups: Mapping[str, Mapping[str, StoredTensor]], tensors: bool) -> dict[str, object]:
    return {
        group: {"tensors": len(found), "elements": _elements(found), "size": _size(found)}
        | ({"contents": {name: vars(tensor) for name, tensor in found.items()}} if tensors else {})
        for group, found in groups.items()
    }


def _elements(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.elements for tensor in tensors.values())


def _size(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.size for tensor in tensors.values())


def _types(tensors: Mapping[str, StoredTensor]) -> str:
    types = Counter(tensor.dtype for tensor in tensors.values())
    return ", ".join(dtype for dtype, _ in types.most_common())
