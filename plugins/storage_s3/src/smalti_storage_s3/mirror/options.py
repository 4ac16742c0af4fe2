"""The options of mirrors. Imports neither torch nor boto3."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from smalti import Config, OptionGroup, Options, Problem, Translation, UserError, option
from smalti.config import LaunchOptions
from smalti_storage_s3.mirror.place import SCHEME, Access, check_place


class MirrorOptions(Options):
    checkpoint_mirror: str | None = option(
        None, help="Where checkpoints are copied while the run trains: s3://BUCKET/PREFIX, or a folder."
    )
    checkpoint_mirror_total_limit: int | None = option(
        None, help="Keep this many checkpoints in the mirror; 0 keeps all. Default: checkpoints_total_limit.", ge=0
    )
    checkpoint_mirror_timeout: int = option(
        1800,
        help="Seconds that the run waits at its end for the upload of its last checkpoint.",
        ge=0,
        level="advanced",
    )
    checkpoint_mirror_verify: bool = option(
        True,
        help="Read the newest checkpoint back from the mirror before older ones are removed there.",
        level="advanced",
        tradeoff="each checkpoint is downloaded once; damage in the store is found before older checkpoints are gone",
    )
    checkpoint_mirror_endpoint_url: str | None = option(
        None, help="URL of the object store. Default: AWS_ENDPOINT_URL, or Amazon S3.", level="advanced"
    )
    checkpoint_mirror_profile_name: str | None = option(
        None, help="Profile of the AWS tools with the credentials. Default: the usual environment and files.", level="advanced"
    )
    checkpoint_mirror_region_name: str | None = option(
        None, help="Region of the bucket. Default: that of the environment or profile.", level="advanced"
    )

    @property
    def access(self) -> Access:
        return Access(
            endpoint_url=self.checkpoint_mirror_endpoint_url,
            profile_name=self.checkpoint_mirror_profile_name,
            region_name=self.checkpoint_mirror_region_name,
        )


def run_directory_at(url: str) -> Translation:
    """What `--output_dir=s3://BUCKET/PREFIX` stands for: a run directory on this node, and a mirror."""
    try:
        check_place(url)
    except UserError as error:
        return Translation(problems=[Problem(message=error.message, fix=error.fix)])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "smalti" / "runs" / quote(url.removeprefix(SCHEME).strip("/"), safe="")
    remark = f"is the mirror of a run directory on this node: {folder}"
    return Translation(
        values={"output_dir": ("output_dir", str(folder)), "checkpoint_mirror": ("output_dir", url)}, notices=[(url, remark)]
    )


GROUP = OptionGroup(name="mirror", title="Mirror of checkpoints", options=MirrorOptions, urls={"output_dir": run_directory_at})


def mirror_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the options of a mirror."""
    place = config[MirrorOptions].checkpoint_mirror
    if place is not None:
        try:
            check_place(place)
        except UserError as error:
            yield Problem(message=error.message, where=config.source("checkpoint_mirror"), fix=error.fix)
    launch = config[LaunchOptions]
    if launch.num_machines > 1 and not launch.shared_output_dir and place is None:
        yield Problem(
            message="shared_output_dir is off, so the parts of a checkpoint on several nodes need a place to meet",
            where=config.source("shared_output_dir"),
            fix="--checkpoint_mirror=s3://BUCKET/PREFIX",
        )
