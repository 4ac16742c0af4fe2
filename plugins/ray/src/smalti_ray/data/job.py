"""What a command gives to its workers: the configuration, and a folder that all of them see."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import click

from smalti import Config, UserError
from smalti.config import LaunchOptions
from smalti.plugins import Plugins
from smalti_ray.data.options import EngineOptions
from smalti_ray.data.pool import Workers
from smalti_ray.data.worker import Job


@contextmanager
def workers_for(
    kind: Literal["scan", "encode"], config: Config, plugins: Plugins, folder: Path, others: Sequence[Path] = ()
) -> Iterator[Workers]:
    """The workers of a job, within a connection to the cluster. They end with the block.

    `folder` has the indexes of the datasets. It and `others` are folders into which workers write: each has to see them. Raises
    UserError if this machine cannot write into one of them.
    """
    with ExitStack() as closing:
        job = Job(
            kind=kind,
            values=config.values(),
            accelerate=config.accelerate,
            plugins=tuple(plugins.versions),
            current=str(Path.cwd()),
            folder=str(folder.absolute()),
            probes=tuple(str(closing.enter_context(_probe(each.absolute()))) for each in (folder, *others)),
        )
        gpus = 0.0 if kind == "scan" or config[LaunchOptions].use_cpu else config[EngineOptions].engine_gpus
        workers = Workers(job=job, options=config[EngineOptions], gpus=gpus, say=say)
        closing.callback(workers.close)
        yield workers


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """A new file in a folder, which is made if it is missing."""
    path = folder / f".probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        fix = "give a folder on a file system that all nodes share and can write to"
        raise UserError(f"cannot write into {folder}: {error.strerror or error}", fix=fix) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    """Show a line to the user, beside the output of the command."""
    click.echo(f"smalti: {text}", err=True)
