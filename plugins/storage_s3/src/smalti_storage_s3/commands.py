"""`smalti s3 check`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smalti import ExitCode, UserError
from smalti.cli import Command, CommandLine, Group, counted

if TYPE_CHECKING:
    from smalti_storage_s3.client.settings import S3Settings


@click.group(cls=Group, examples=("smalti s3 check s3://BUCKET/photos",))
def s3() -> None:
    """Check access to S3 and compatible stores."""


@s3.command(
    "check",
    cls=Command,
    examples=(
        "smalti s3 check s3://BUCKET/photos --endpoint_url=https://HOST",
        "smalti s3 check multidatabackend.json",
    ),
)
@click.argument("place")
@click.option("--endpoint_url", metavar="TEXT", help="URL of the store. Default: AWS_ENDPOINT_URL, or Amazon S3.")
@click.option("--profile_name", metavar="TEXT", help="Profile of the AWS tools with the credentials.")
@click.option("--region_name", metavar="TEXT", help="Region of the bucket.")
@click.option("--write/--no_write", default=False, help="Also write, read and delete a small file, .smalti-check-*.")
@click.option("--abort_abandoned", is_flag=True, help="Remove the parts of uploads that began over a day ago and never ended.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_place(
    place: str,
    endpoint_url: str | None,
    profile_name: str | None,
    region_name: str | None,
    write: bool,
    abort_abandoned: bool,
    as_json: bool,
) -> None:
    """Try to list and read a bucket, and say what is wrong: address, region, keys, clock, permissions.

    PLACE is s3://BUCKET/PREFIX, or a file with datasets, whose entries of type aws are all tried. Nothing is written without
    --write.
    """
    from smalti_storage_s3.check import check
    from smalti_storage_s3.client.attempts import Timeouts
    from smalti_storage_s3.client.storage import S3Storage

    access = {"aws_endpoint_url": endpoint_url, "aws_profile_name": profile_name, "aws_region_name": region_name}
    places = _places(place, access)
    timeouts = Timeouts(deadline=20, first_deadline=8)
    found = []
    for settings in places:
        storage = S3Storage(settings, timeouts=timeouts)
        if abort_abandoned:
            uploads = storage.abandoned_uploads()
            storage.abort_uploads(uploads)
            click.echo(f"{storage.location}: {counted(len(uploads), 'abandoned upload')} removed", err=True)
        found.append((storage.location, check(storage, write=write)))
    if as_json:
        click.echo(json.dumps([{"place": where, "checks": [asdict(one) for one in all_]} for where, all_ in found], indent=2))
    else:
        for where, all_ in found:
            click.echo(where)
            for one in all_:
                click.echo(f"  {'ok    ' if one.ok else 'FAILED'}  {one.name}: {one.detail}")
                if one.fix:
                    click.echo(f"          fix: {one.fix}")
    if any(one.ok is False for _, all_ in found for one in all_):
        sys.exit(ExitCode.PREFLIGHT)


def _places(place: str, access: dict[str, str | None]) -> list[S3Settings]:
    from smalti.data import catalog_of, dataset_specs
    from smalti_storage_s3.client.settings import settings_of, settings_of_url

    if "://" in place:
        return [settings_of_url(place, access)]
    if not Path(place).is_file():
        raise UserError(f"{place!r} is neither s3://BUCKET/PREFIX nor a file", fix="s3://BUCKET/PREFIX, or the data file")
    line = CommandLine.parse((f"--data_backend_config={place}",))
    specs = [spec for spec in dataset_specs(line.config(), catalog_of(line.plugins)) if spec.type == "aws"]
    if not specs:
        raise UserError(f"no dataset in {place} has the type aws", fix='"type": "aws" in an entry')
    return [settings_of(spec.storage_options, f"dataset {spec.id!r}") for spec in specs]
