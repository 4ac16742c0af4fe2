"""`smalti launch`: write the job with which a scheduler starts a run. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from smalti import ExitCode, UserError
from smalti.cli import CommandLine, Group, pop_flag, write_file
from smalti.config import Config
from smalti.plugins import check
from smalti_cluster.jobs.job import Job, job_of
from smalti_cluster.jobs.kubernetes_manifest import KubernetesOptions, manifest
from smalti_cluster.jobs.nodes_of_job import (
    FRUITLESS_LAUNCHES,
    launches_without_step,
    nodes_with_faults,
    result_of,
    split_nodes,
)
from smalti_cluster.jobs.sky_task import SkyOptions, gpus_of, sky_task
from smalti_cluster.jobs.slurm_script import SlurmOptions, job_script

_PER_NODE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes")
"""Options that the job gives to each node."""
_UNPROCESSED = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
_ARGUMENTS = click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
_RUN = click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
_ARRAY = re.compile(r"\s*(--array\b|-a)")
F = TypeVar("F", bound=Callable[..., object])


def _shared(function: F) -> F:
    """The options of both schedulers."""
    for declared in reversed(
        (
            click.option("--nodes", help="Number of nodes, or MIN:MAX as in smalti train. Default: that of the configuration."),
            click.option("--gpus_per_node", type=click.IntRange(min=1), help="GPUs of each node, one rank for each."),
            click.option("--job_name", metavar="NAME", help="Name of the job. Default: that of the run directory."),
            click.option(
                "--output", type=click.Path(path_type=Path), help="Write this new file. Default: named after the job."
            ),
            click.option("--dry-run", is_flag=True, help="Print the file instead of writing it."),
            click.option("--submit", is_flag=True, help="Also submit it."),
        )
    ):
        function = declared(function)
    return function


@click.group(
    cls=Group,
    examples=(
        "smalti launch slurm config.toml --nodes=2 --gpus_per_node=8 --submit",
        "smalti launch kubernetes config.toml --image=smalti:1 --claim=data",
        "smalti launch sky config.toml --gpus=H100:8 --bucket=s3://BUCKET/a",
    ),
)
def launch() -> None:
    """Write the job with which SLURM, Kubernetes or SkyPilot starts a run."""


@launch.command(
    context_settings=_UNPROCESSED,
    examples=(
        "smalti launch slurm config.toml --nodes=2 --gpus_per_node=8 --time=24:00:00",
        'smalti launch slurm config.toml --sbatch="--constraint=h100" --submit',
    ),
)
@_ARGUMENTS
@_shared
@click.option("--spares", default=0, type=click.IntRange(min=0), help="Further nodes of the job, which replace failed ones.")
@click.option("--partition", default="", help="Partition of the job.")
@click.option("--account", default="", help="Account of the job.")
@click.option("--qos", default="", help="Quality of service of the job.")
@click.option("--time", "limit", default="", help="Time limit, as in 24:00:00.")
@click.option("--mem", default="", help="Memory of each node, as in 500G; 0 is all of it. Default: all of whole nodes.")
@click.option("--cpus_per_task", type=click.IntRange(min=1), help="Cores of each node. Default: whole nodes, if several.")
@click.option("--max_requeues", default=100, show_default=True, help="Queue the job again at most this often.")
@click.option("--max_failures", default=10, show_default=True, help="And at most this often after a failure.")
@click.option(
    "--sbatch",
    multiple=True,
    help="A further #SBATCH line. --gres=gpu:8 replaces --gpus-per-node, which not every site has. May be repeated.",
)
@click.option("--setup", multiple=True, help='A line of shell that runs first, as in "module load cuda". May be repeated.')
def slurm(
    arguments: tuple[str, ...],
    nodes: str | None,
    gpus_per_node: int | None,
    job_name: str | None,
    output: Path | None,
    dry_run: bool,
    submit: bool,
    spares: int,
    limit: str,
    max_requeues: int,
    max_failures: int,
    sbatch: tuple[str, ...],
    **words: str,
) -> None:
    """Write a job script for SLURM.

    Takes the same arguments as `smalti train`. The job saves before its time limit, and queues itself again as long as that
    helps. It starts in the current folder, with this installation of smalti.
    """
    if any(_ARRAY.match(line) for line in sbatch):
        message = "the tasks of a job array would all train in the same run directory"
        raise UserError(message, fix="write one job for each run, each with its own --output_dir, and without --array")
    job, _ = _job(arguments, nodes=nodes, gpus=gpus_per_node, name=job_name, limited=bool(limit))
    file = (output or Path(f"{job.name}.sbatch")).expanduser().absolute()
    options = SlurmOptions(
        spares=spares,
        time=limit,
        requeues=max_requeues,
        failures=max_failures,
        directives=sbatch,
        **words,  # type: ignore[arg-type]
    )
    program = (sys.executable, "-m", "smalti")
    text = job_script(job, options, program=program, folder=Path.cwd(), file=file, title=_title("slurm"))
    if dry_run:
        click.echo(text, nl=False)
        return
    _write_new(file, text)
    excluded = ",".join(sorted(nodes_with_faults(Path(job.directory))))
    _submit(["sbatch", *([f"--exclude={excluded}"] if excluded else []), str(file)], submit=submit)


@launch.command(
    context_settings=_UNPROCESSED,
    examples=(
        "smalti launch kubernetes config.toml --image=smalti:1 --claim=data",
        "smalti launch kubernetes config.toml --image=smalti:1 --claim=data --nodes=2",
    ),
)
@_ARGUMENTS
@_shared
@click.option("--image", required=True, help="Image with smalti and its plugins.")
@click.option("--claim", required=True, help="Persistent volume claim (ReadWriteMany) with the data and the run directory.")
@click.option("--mount", default="/data", show_default=True, help="Where it is mounted. Relative paths start there.")
@click.option("--namespace", default="", help="Namespace of the job.")
@click.option("--memory", default="", help="Memory that a pod requests, as in 500Gi.")
@click.option("--cpu", default="", help="Cores that a pod requests.")
@click.option("--shm", default="16Gi", show_default=True, help="Size of /dev/shm, which counts as memory of the pod.")
@click.option("--secret", default="", help="Secret whose keys become environment variables.")
@click.option("--resource", multiple=True, metavar="NAME=COUNT", help="A further resource of a pod, as in rdma/hca=1.")
def kubernetes(
    arguments: tuple[str, ...],
    nodes: str | None,
    gpus_per_node: int | None,
    job_name: str | None,
    output: Path | None,
    dry_run: bool,
    submit: bool,
    resource: tuple[str, ...],
    **words: str,
) -> None:
    """Write a manifest for Kubernetes: an indexed Job, with the configuration file in a ConfigMap.

    Takes the same arguments as `smalti train`.
    """
    if bad := [each for each in resource if "=" not in each]:
        raise UserError(f"--resource={bad[0]} has no number", fix="--resource=rdma/hca=1")
    job, file = _job(arguments, nodes=nodes, gpus=gpus_per_node, name=job_name)
    config = None if file is None else (f"config{file.suffix}", file.read_text(encoding="utf-8"))
    options = KubernetesOptions(resources=dict(each.split("=", 1) for each in resource), **words)
    text = manifest(job, options, config=config, title=_title("kubernetes"))
    if dry_run:
        click.echo(text, nl=False)
        return
    target = (output or Path(f"{job.name}.yaml")).expanduser().absolute()
    _write_new(target, text)
    _submit(["kubectl", "create", "--filename", str(target)], submit=submit)


@launch.command(
    context_settings=_UNPROCESSED,
    examples=("smalti launch sky config.toml --gpus=H100:8 --bucket=s3://BUCKET/a --spot",),
)
@_ARGUMENTS
@click.option("--gpus", required=True, help="GPUs of each node, as in H100:8, one rank for each.")
@click.option("--bucket", required=True, help="Where checkpoints go, as in s3://BUCKET/first. A new node resumes from there.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of nodes.")
@click.option("--spot", is_flag=True, help="Rent spot instances, which may be taken away.")
@click.option("--setup", multiple=True, help="A line of shell that installs smalti there. May be repeated.")
@click.option("--mount", multiple=True, metavar="PATH=SOURCE", help="Data on each node, as in /data=s3://BUCKET/images.")
@click.option("--job_name", metavar="NAME", help="Name of the task. Default: that of the run directory.")
@click.option("--output", type=click.Path(path_type=Path), help="Write this new file. Default: named after the task.")
@click.option("--dry-run", is_flag=True, help="Print the file instead of writing it.")
def sky(
    arguments: tuple[str, ...],
    gpus: str,
    bucket: str,
    nodes: int,
    spot: bool,
    setup: tuple[str, ...],
    mount: tuple[str, ...],
    job_name: str | None,
    output: Path | None,
    dry_run: bool,
) -> None:
    """Write a task for SkyPilot, which rents nodes and starts a run again where they are lost.

    Takes the same arguments as `smalti train`. Checkpoints go to a bucket. No run on a cloud has been tried.
    """
    if bad := [each for each in mount if "=" not in each]:
        raise UserError(f"--mount={bad[0]} has no source", fix="--mount=/data=s3://BUCKET/images")
    range_of_nodes = str(nodes) if nodes > 1 else None
    job, _ = _job(arguments, nodes=range_of_nodes, gpus=gpus_of(gpus), name=job_name)
    options = SkyOptions(
        gpus=gpus, bucket=bucket, folder=Path.cwd(), spot=spot, setup=setup, mounts=dict(each.split("=", 1) for each in mount)
    )
    text = sky_task(job, options, title=_title("sky"))
    if dry_run:
        click.echo(text, nl=False)
        return
    target = (output or Path(f"{job.name}.sky.yaml")).expanduser().absolute()
    _write_new(target, text)
    _submit(["sky", "jobs", "launch", str(target)], submit=False)


def _job(
    arguments: Sequence[str], *, nodes: str | None, gpus: int | None, name: str | None, limited: bool = False
) -> tuple[Job, Path | None]:
    """The job and the configuration file. Raises ConfigError and UserError for a configuration that cannot be launched."""
    if nodes is not None and re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes) is None:
        raise UserError(f"--nodes={nodes} is not a number of nodes", fix="--nodes=4, or --nodes=4:6 for a range")
    count = int(nodes.rpartition(":")[2]) if nodes else None
    command_line = CommandLine.parse([*arguments, *([f"--nodes={nodes}"] if nodes and ":" in nodes else [])])
    words = command_line.without(*_PER_NODE)
    given = _config(command_line.without(*_PER_NODE[:-1]), count)
    job = job_of(given, words, nodes=count, gpus=gpus, name=name, limited=limited)
    check(_config([*job.words, f"--num_processes={job.processes}"], job.nodes), command_line.plugins)
    return job, command_line.file


def _config(words: Sequence[str], nodes: int | None) -> Config:
    """The configuration as node 0 of a job has it."""
    launched = [f"--num_machines={nodes}"] if nodes else []
    return CommandLine.parse([*words, *launched, "--machine_rank=0", "--main_process_ip=node-0"]).config()


def _title(kind: str) -> str:
    words = sys.argv[1:]
    pop_flag(words, "--submit", "--dry-run")
    return f"Written by: smalti {shlex.join(words) if words[:1] == ['launch'] else f'launch {kind}'}"


def _write_new(file: Path, text: str) -> None:
    """Write a new file. One with the same content is left as it is. Raises UserError if it has another one."""
    if not file.exists():
        write_file(file, text)
    elif file.read_bytes() != text.encode():
        raise UserError(f"{file} exists and has other content", fix="--output=FILE for another file, or remove it")


def _submit(command: list[str], *, submit: bool) -> None:
    """Run the command, or print it. Raises UserError if it is missing or fails."""
    if not submit:
        click.echo(f"smalti: to submit it: {shlex.join(command)}", err=True)
        return
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no {command[0]} here", fix=f"submit it where there is one: {shlex.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    click.echo(done.stdout, nl=False)
    if done.returncode:
        raise UserError(f"{command[0]} has refused the job: {done.stderr.strip()}", fix=f"try it: {shlex.join(command)}")


# --- what the job script asks -----------------------------------------------------------------------------------------


@launch.command(examples=("smalti launch nodes runs/first --count=2", "smalti launch nodes runs/first --unusable"))
@_RUN
@click.option("--count", type=click.IntRange(min=1), help="The number of nodes to print. Default: all that can be used.")
@click.option("--unusable", is_flag=True, help="Print those that cannot be used.")
@click.pass_context
def nodes(context: click.Context, directory: Path, count: int | None, unusable: bool) -> None:
    """Print the nodes of this SLURM job that a run can use.

    Those are left out on which an accelerator has failed in this run within a week, and that SLURM calls down, drained or
    failing. The exit code is 9 if there are fewer than --count.
    """
    usable, others = split_nodes(directory, os.environ)
    click.echo(",".join(others if unusable else usable[:count]))
    if not unusable and len(usable) < (count or 1):
        click.echo(f"smalti: {len(usable)} of {count or 1} nodes can be used, without {', '.join(others)}", err=True)
        context.exit(ExitCode.KILLED)


@launch.command(examples=("smalti launch result runs/first --status=$?",))
@_RUN
@click.option("--status", required=True, type=int, help="What srun has returned.")
@click.option("--since", type=float, help="When it was started, in unix seconds. Default: a day ago.")
def result(directory: Path, status: int, since: float | None) -> None:
    """Print the exit code of a run that srun has started.

    srun returns 0 after a node has failed while its job continues. The run directory has the result.
    """
    click.echo(str(result_of(directory, status, time.time() - 86400 if since is None else since)))


@launch.command(examples=("smalti launch progress runs/first",))
@_RUN
@click.pass_context
def progress(context: click.Context, directory: Path) -> None:
    """Say whether it helps to start a run again.

    The exit code is 10 if the last 3 launches have made no new step.
    """
    if (count := launches_without_step(directory)) >= FRUITLESS_LAUNCHES:
        click.echo(f"smalti: the last {count} launches made no new step, so the job is not queued again", err=True)
        click.echo("  fix: give it more time (--time), or see why it stops: smalti status", err=True)
        context.exit(ExitCode.FAULT_LOOP)
