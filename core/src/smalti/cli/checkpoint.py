"""`smalti checkpoint`: list, inspect and verify checkpoints. No command changes a checkpoint. Imports no torch.

`verify` exits with 1 if anything is damaged. All commands exit with 2 if there is no checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import click

from smalti.checkpoint import ListedCheckpoint, Manifest, StoredTensor
from smalti.cli.output import counted, format_bytes, print_table
from smalti.cli.pages.help import Group
from smalti.cli.places import Place, place_at
from smalti.errors import CheckpointError

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
    """List, inspect, verify and export checkpoints."""


@checkpoint.command("ls", examples=("smalti checkpoint ls runs/first",))
@click.argument("run_dir", type=place_at)
@_as_json
def list_checkpoints(run_dir: Place, as_json: bool) -> None:
    """List the checkpoints of RUN_DIR, a folder or URL. Reads only their manifests; `verify` reads everything."""
    found = run_dir.checkpoints()
    if as_json:
        _print_json([_listed_as_json(each) for each in found])
        return
    rows = [
        (each.name, format_bytes(m.size), str(m.world_size), m.created, ", ".join(m.flags))
        if (m := each.manifest)
        else (each.name, "", "", "", f"not usable: {each.problem}")
        for each in found
    ]
    print_table(("checkpoint", "size", "ranks", "made", ""), rows, right=(1, 2))


@checkpoint.command(
    "inspect",
    examples=(
        "smalti checkpoint inspect runs/first",
        "smalti checkpoint inspect runs/first/checkpoints/step-00001000 --tensors",
    ),
)
@click.argument("path", type=place_at)
@click.option("--tensors", is_flag=True, help="List every tensor with its shape.")
@_as_json
def inspect_checkpoint(path: Place, tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint contains.

    PATH is the path or URL of a checkpoint, or of a run directory (its newest). Contents are not verified.
    """
    found = path.newest()
    if (manifest := found.manifest) is None:
        raise CheckpointError(f"{found.path}: {found.problem}", fix="give another checkpoint of the run, or its directory")
    groups = path.tensors(found)
    made_with = cast(Mapping[str, str], path.state(found).trainer.get("made_with", {}))
    if as_json:
        _print_json(
            {**_manifest_as_json(found.path, manifest), "made_with": made_with, "groups": _groups_as_json(groups, tensors)}
        )
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


# --- showing --------------------------------------------------------------------------------------------------------


def _listed_as_json(each: ListedCheckpoint) -> dict[str, object]:
    if each.manifest:
        return _manifest_as_json(each.path, each.manifest) | {"problem": ""}
    return {"path": each.path, "step": each.step, "problem": each.problem}


def _manifest_as_json(path: str, manifest: Manifest) -> dict[str, object]:
    fields = {name: value for name, value in vars(manifest).items() if name != "files"}
    return {"path": path, "size": manifest.size, **fields}


def _groups_as_json(groups: Mapping[str, Mapping[str, StoredTensor]], tensors: bool) -> dict[str, object]:
    return {
        group: {"tensors": len(found), "elements": _elements(found), "size": _size(found)}
        | ({"contents": {name: vars(tensor) for name, tensor in found.items()}} if tensors else {})
        for group, found in groups.items()
    }


def _print_verification(each: ListedCheckpoint, problems: Sequence[str]) -> None:
    if each.manifest and not problems:
        click.echo(f"{each.name}  ok  {format_bytes(each.manifest.size)}")
        return
    click.echo(f"{each.name}  DAMAGED")
    for problem in problems:
        click.echo(f"    {problem}")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _elements(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.elements for tensor in tensors.values())


def _size(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.size for tensor in tensors.values())


def _types(tensors: Mapping[str, StoredTensor]) -> str:
    types = Counter(tensor.dtype for tensor in tensors.values())
    return ", ".join(dtype for dtype, _ in types.most_common())
