"""The task with which SkyPilot rents nodes for a run. Its checkpoints go to a bucket, from which a new node resumes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smalti import ExitCode, UserError
from smalti_cluster.jobs.job import Job, comment, yaml_of

_GPUS = re.compile(r"([A-Za-z][A-Za-z0-9-]*)(?::([1-9]\d*))?")
_AGAIN = (ExitCode.GPU_FAULT, ExitCode.PREEMPTED, ExitCode.KILLED, ExitCode.UNAVAILABLE)
"""Exit codes after which a managed job starts on another node."""
_NODE = (
    "--num_machines=$SKYPILOT_NUM_NODES",
    "--machine_rank=$SKYPILOT_NODE_RANK",
    '--main_process_ip="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
)


@dataclass(frozen=True, kw_only=True)
class SkyOptions:
    """What is rented: `gpus` as in "H100:8" for each node. `bucket` is where checkpoints go: s3://BUCKET/FOLDER.

    `setup` are lines of shell that install smalti. `mounts` are buckets or folders by their path on the node.
    """

    gpus: str
    bucket: str
    folder: Path
    spot: bool = False
    setup: Sequence[str] = ()
    mounts: Mapping[str, str] = field(default_factory=dict)


def gpus_of(text: str) -> int:
    """The number of GPUs of a node. Raises UserError if it does not say which GPUs."""
    if (found := _GPUS.fullmatch(text)) is None:
        raise UserError(f"--gpus={text} names no GPUs", fix="--gpus=H100:8, the kind of GPU and how many a node has")
    return int(found[2] or 1)


def sky_task(job: Job, options: SkyOptions, *, title: str) -> str:
    """The task as YAML. Raises UserError for a place of checkpoints that a new node could not read."""
    if not options.bucket.startswith("s3://"):
        message = f"--bucket={options.bucket} is not in a bucket, and a node that is lost takes its checkpoints along"
        raise UserError(message, fix=f"--bucket=s3://BUCKET/{job.name}")
    place = (f"--output_dir={options.bucket}", f"--num_processes={job.processes}")
    several = ("--no_shared_output_dir", *_NODE) if job.nodes > 1 else ()
    task: dict[str, object] = {
        "name": job.name,
        "workdir": str(options.folder),
        "num_nodes": job.nodes,
        "resources": {
            "accelerators": options.gpus if ":" in options.gpus else f"{options.gpus}:{job.gpus}",
            "use_spot": options.spot,
            "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [int(code) for code in _AGAIN]},
        },
        **({"file_mounts": dict(options.mounts)} if options.mounts else {}),
        "setup": "\n".join(options.setup or ('pip install "smalti[usual]" smalti-cluster smalti-storage-s3',)) + "\n",
        "run": f"exec smalti train {' '.join([shlex.join([*job.words, *place]), *several])}\n",
    }
    return f"# {comment(title)}\n# Untried on a cloud. To start it: sky jobs launch FILE\n{yaml_of([task])}"
