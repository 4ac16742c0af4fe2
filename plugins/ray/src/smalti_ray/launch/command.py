"""`smalti launch ray`: start a run on a Ray cluster, or print what does. Imports Ray only to start it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from smalti import Config, ExitCode, UserError
from smalti.cli import Command, CommandLine, pop_flag
from smalti.config import LaunchOptions, RunOptions
from smalti.plugins import check
from smalti.rundir import RunDirectory
from smalti_cluster.jobs.job import job_name
from smalti_cluster.options import ClusterOptions
from smalti_ray.data.options import ADDRESS_HELP
from smalti_ray.launch.manifest import ManifestOptions, manifest

_OF_WORKERS = ("nodes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes")
"""Options that each worker is given."""
_GROW_AFTER = "5m"
_WORKERS = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    examples=(
        "smalti launch ray config.toml --workers=8",
        "smalti launch ray config.toml --workers=4:8 --address=10.0.0.1:6379",
        "smalti launch ray config.toml --workers=2 --gpus_per_worker=8 --dry-run",
    ),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--workers", required=True, help="Number of workers, or MIN:MAX: the run continues on MIN workers or more.")
@click.option("--address", help=ADDRESS_HELP)
@click.option("--gpus_per_worker", type=click.IntRange(min=1), help="GPUs of each worker, one rank for each. Default: 1.")
@click.option("--cpus_per_worker", type=click.IntRange(min=1), default=1, show_default=True, help="Cores of each worker.")
@click.option(
    "--wait_seconds", type=click.IntRange(min=0), default=600, show_default=True, help="How long to wait for resources."
)
@click.option(
    "--restarts", type=click.IntRange(min=0), default=3, show_default=True, help="New starts of all workers without a new step."
)
@click.option("--image", default="", help="With --dry-run: image of the manifest, with smalti and its plugins.")
@click.option("--claim", default="", help="With --dry-run: persistent volume claim of the manifest, with data and runs.")
@click.option("--mount", default="/data", show_default=True, help="Where it is mounted. Relative paths start there.")
@click.option("--dry-run", is_flag=True, help="Print the command of Ray Jobs, or with --image the manifest for KubeRay.")
@click.pass_context
def ray(
    context: click.Context,
    arguments: tuple[str, ...],
    workers: str,
    address: str | None,
    gpus_per_worker: int | None,
    cpus_per_worker: int,
    wait_seconds: int,
    restarts: int,
    image: str,
    claim: str,
    mount: str,
    dry_run: bool,
) -> None:
    """Start a run on a Ray cluster, and start it again where nodes come and go.

    Takes the same arguments as `smalti train`. The run directory has to be on storage that all nodes share.
    """
    least, most = worker_range(workers)
    line = CommandLine.parse(arguments)
    words = line.without(*_OF_WORKERS)
    config = CommandLine.parse(words).config()
    gpus = 0 if config[LaunchOptions].use_cpu else gpus_per_worker or 1
    if gpus_per_worker and not gpus:
        raise UserError(f"--gpus_per_worker={gpus_per_worker} is for runs on GPUs, and --use_cpu is given", fix="leave one out")
    processes = gpus or 1
    checked = _worker_config(words, least, most, processes)
    check(checked, line.plugins)
    if least < most and checked[ClusterOptions].grow_after is None:
        words.append(f"--grow_after={_GROW_AFTER}")
    directory = config[RunOptions].output_dir
    assert directory is not None, "a checked configuration has one"
    name = job_name(directory.name)
    if dry_run:
        options = ManifestOptions(
            image=image, claim=claim, mount=mount, gpus=gpus, cpus=cpus_per_worker, least=least, most=most
        )
        click.echo(manifest(name, options, line.file, _words()) if image or claim else job_command(_words()))
        return
    from smalti_ray.cluster import connected
    from smalti_ray.launch.driver import Run, drive
    from smalti_ray.launch.placement import Needs

    needs = Needs(name=name, least=least, most=most, gpus=gpus, cpus=cpus_per_worker, seconds=wait_seconds)
    directory = directory.absolute()
    run = Run(
        words=words,
        processes=processes,
        folder=str(Path.cwd()),
        directory=RunDirectory(directory),
        files={} if line.file is None else {str(line.file.absolute()): line.file.read_text("utf-8", "surrogateescape")},
        restarts=restarts,
    )
    with connected(address, log_to_driver=True):
        code, message = drive(needs, run)
    click.echo(f"smalti: {'done' if code is ExitCode.DONE else f'ended with exit code {int(code)}'}: {message}", err=True)
    context.exit(int(code))


def worker_range(text: str) -> tuple[int, int]:
    """The least and the most workers. Raises UserError if it is neither a number nor a range."""
    found = _WORKERS.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--workers={text} is not a number of workers", fix="--workers=8, or --workers=4:8 for a range")
    return least, most


def _worker_config(words: Sequence[str], least: int, most: int, processes: int) -> Config:
    """The configuration as worker 0 has it."""
    several = [
        f"--nodes={most if least == most else f'{least}:{most}'}",
        f"--num_machines={most}",
        "--main_process_ip=worker-0",
    ]
    return CommandLine.parse([*words, f"--num_processes={most * processes}", *(several if most > 1 else [])]).config()


def _words() -> list[str]:
    """The words of this command, without those of a dry run."""
    words = sys.argv[1:]
    pop_flag(words, "--dry-run")
    names = ("--image", "--claim", "--mount", "--address")
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word.partition("=")[0] not in names:
            kept.append(word)
        elif "=" not in word:
            words.pop(0)
    return ["smalti", *kept]


def job_command(words: Sequence[str]) -> str:
    """What submits this launch to Ray Jobs, in the current folder of a cluster whose nodes share it."""
    return f"ray job submit -- sh -c {shlex.quote(f'cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}')}"
