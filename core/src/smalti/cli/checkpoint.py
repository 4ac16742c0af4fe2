"""`smalti checkpoint`: list and verify checkpoints. No command changes a checkpoint. Imports no torch.

`verify` exits with 1 if anything is damaged. All commands exit with 2 if there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from smalti.checkpoint import ListedCheckpoint, Manifest
from smalti.cli.output import format_bytes, print_table
from smalti.cli.pages.help import Group
from smalti.cli.places import Place, place_at

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
