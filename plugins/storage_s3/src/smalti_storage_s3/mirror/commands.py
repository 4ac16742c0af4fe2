"""`smalti mirror`: list, verify, upload and download copies of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from smalti import UserError
from smalti.cli import Command, Group, format_bytes, print_table
from smalti_storage_s3.mirror.place import Access

if TYPE_CHECKING:
    from smalti_data.remote.checkpoints import RemoteRun


def _access(function: Callable[..., object]) -> Callable[..., object]:
    """Adds the options that say how an object store is reached; `function` gets them as `access`."""

    @wraps(function)
    def call(*arguments: object, **values: object) -> object:
        access = Access(**{name: cast(str | None, values.pop(name)) for name in _ACCESS})
        return function(*arguments, access=access, **values)

    for name, text in reversed(_ACCESS.items()):
        call = click.option(f"--{name}", metavar="TEXT", help=text)(call)
    return call


_ACCESS = {
    "endpoint_url": "URL of the object store. Default: AWS_ENDPOINT_URL, or Amazon S3.",
    "profile_name": "Profile of the AWS tools with the credentials.",
    "region_name": "Region of the bucket.",
}


@click.group(
    cls=Group,
    examples=(
        "smalti mirror ls s3://bucket/runs/first",
        "smalti mirror pull s3://bucket/runs/first runs/first",
    ),
)
def mirror() -> None:
    """List, verify, upload and download the copies of runs that --checkpoint_mirror makes."""


@mirror.command("ls", cls=Command, examples=("smalti mirror ls s3://bucket/runs/first",))
@click.argument("place")
@_access
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_checkpoints(place: str, as_json: bool, access: Access) -> None:
    """List the checkpoints of a mirror. PLACE is s3://BUCKET/PREFIX or a folder. Reads only their manifests."""
    from smalti_data.remote.checkpoints import UNUSABLE

    found, rows, described = _open(place, access), [], []
    for each in found.all():
        try:
            manifest = found.manifest(each) if each.published else None
            problem = "" if manifest else "not complete: its upload has not ended"
        except UNUSABLE as error:
            manifest, problem = None, f"not usable: {error.message}"
        size, made = (manifest.size, manifest.created) if manifest else (None, "")
        rows.append((each.name, "" if size is None else format_bytes(size), made, problem))
        described.append({"name": each.name, "step": each.step, "size": size, "created": made, "problem": problem})
    if as_json:
        click.echo(json.dumps(described, indent=2))
    else:
        print_table(("checkpoint", "size", "made", ""), rows, right=(1,))


@mirror.command("verify", cls=Command, examples=("smalti mirror verify s3://bucket/runs/first",))
@click.argument("place")
@click.option("--step", default="latest", metavar="STEP", help="Step of the checkpoint. Default: the newest one.")
@click.option("--all", "everything", is_flag=True, help="Verify all checkpoints.")
@_access
@click.pass_context
def verify(context: click.Context, place: str, step: str, everything: bool, access: Access) -> None:
    """Read every byte of a checkpoint in a mirror and compare the digests. Exits with 1 if anything is damaged."""
    found = _open(place, access)
    chosen = found.published() if everything else list(found.find(step))[:1]
    damaged = False
    for each in chosen:
        problems = found.problems(each)
        damaged |= bool(problems)
        click.echo(f"{each.name}  {'DAMAGED' if problems else 'ok'}")
        for problem in problems:
            click.echo(f"    {problem}")
    context.exit(1 if damaged else 0)


@mirror.command(
    "pull",
    cls=Command,
    examples=(
        "smalti mirror pull s3://bucket/runs/first runs/first",
        "smalti mirror pull s3://bucket/runs/first runs/first --step=1000",
    ),
)
@click.argument("place")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", default="latest", metavar="STEP", help="Step of the checkpoint. Default: the newest intact one.")
@_access
def pull(place: str, run_dir: Path, step: str, access: Access) -> None:
    """Download a run: a checkpoint, its configuration and events. What RUN_DIR has already stays as it is."""
    from smalti.rundir import RunDirectory
    from smalti_storage_s3.mirror.ownership import check_owner
    from smalti_storage_s3.mirror.pulling import pull as download

    found, run = _open(place, access), RunDirectory(run_dir)
    if (record := run.record()) is not None:
        check_owner(found.storage, record.id)
    path = download(found, run, step, lambda sentence: click.echo(sentence, err=True))
    click.echo(f"{path}: complete, from {found.location}")
    if run.config_file.exists():
        click.echo(f"to resume: smalti train {run.config_file} --output_dir={run.path}")


@mirror.command("push", cls=Command, examples=("smalti mirror push runs/first --to=s3://bucket/runs/first",))
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "place", required=True, metavar="PLACE", help="s3://BUCKET/PREFIX, or a folder.")
@click.option("--keep", default=0, type=click.IntRange(min=0), help="Keep this many checkpoints there. Default: all.")
@click.option("--verify/--no_verify", default=True, help="Read the newest back before older ones are removed.")
@click.option("--watch", is_flag=True, hidden=True)
@click.option("--timeout", default=0, type=click.IntRange(min=0), hidden=True)
@_access
@click.pass_context
def push(
    context: click.Context,
    run_dir: Path,
    place: str,
    keep: int,
    verify: bool,
    watch: bool,
    timeout: int,
    access: Access,
) -> None:
    """Copy the newest checkpoint of a run to a mirror, and the best ones (--keep_best), with what a resume needs.

    What is there already is not sent again.
    """
    from smalti.rundir import RunDirectory
    from smalti_storage_s3.mirror import watching
    from smalti_storage_s3.mirror.ownership import Lease
    from smalti_storage_s3.mirror.place import open_place
    from smalti_storage_s3.mirror.upload import Uploader

    run = RunDirectory(run_dir)
    try:
        if (record := run.record()) is None:
            raise UserError(f"{run_dir} is not a run directory", fix="give the --output_dir of a run")
        lease = Lease.take(open_place(place, access, create=True), record.id)
    except UserError as error:
        if watch:
            watching.emit("failed", message=error.message, fix=error.fix)
            sys.exit(int(error.exit_code))
        raise
    uploader = Uploader(run=run, lease=lease, keep=keep or None, read_back=verify)
    if watch:
        context.exit(0 if watching.watch(uploader, timeout) else 1)
    uploader.report = lambda sentence: click.echo(sentence, err=True)
    uploaded = uploader.push_newest()
    if uploaded is None:
        raise UserError(f"{run_dir} has no complete checkpoint", fix="`smalti checkpoint verify` says why")
    sent = [uploaded, *uploader.push_best()]
    removed = uploader.rotate()
    for each in sent:
        click.echo(f"{each.name}: complete in {lease.storage.location}, {format_bytes(each.sent)} sent")
    for name in removed:
        click.echo(f"{name}: removed there")


def _open(place: str, access: Access) -> RemoteRun:
    from smalti_data.remote.checkpoints import RemoteRun
    from smalti_storage_s3.mirror.place import open_place

    return RemoteRun(open_place(place, access))
