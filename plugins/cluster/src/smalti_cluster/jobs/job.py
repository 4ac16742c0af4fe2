"""What a job of any scheduler runs: the command of a node, and how many nodes and GPUs it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from smalti import Config, UserError
from smalti.config import LaunchOptions, RunOptions
from smalti_cluster.options import ClusterOptions, is_elastic

DEFAULT_GRACE = 300
"""Seconds between the notice of a scheduler and the end, if `--grace_seconds` is not given."""
STOP_BEFORE = "1m"
"""The `--stop_before` of a job with a time limit, if none is given."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run as a scheduler starts it.

    `words` is the configuration file with the options of the run, without those that say which node this is. `processes` is the
    number of ranks over all nodes, and `gpus` of GPUs on each; 0 for a run on CPUs. `grace` is in seconds. An `elastic` run
    continues when some of its nodes are lost, so the job must too.
    """

    name: str
    words: tuple[str, ...]
    directory: str
    nodes: int
    processes: int
    gpus: int
    grace: int
    elastic: bool = False


def job_of(
    config: Config, words: list[str], *, nodes: int | None, gpus: int | None, name: str | None, limited: bool = False
) -> Job:
    """The job of a configuration. `nodes` and `gpus` (of each node) default to what the configuration says.

    A job that is `limited` in time stops `STOP_BEFORE` its end if the configuration does not say when.
    Raises UserError if the number of GPUs is unknown, or does not fit the number of ranks.
    """
    launch, run, cluster = config[LaunchOptions], config[RunOptions], config[ClusterOptions]
    nodes = nodes or launch.num_machines
    given = not config.is_default("num_processes")
    if launch.use_cpu:
        per_node = launch.num_processes // nodes if given else 1
    elif gpus is not None:
        per_node = gpus
    elif given or nodes == 1:
        per_node = launch.num_processes // nodes
    else:
        raise UserError("the number of GPUs of a node is unknown", fix="--gpus_per_node=8, or --num_processes for all nodes")
    processes = per_node * nodes
    if given and launch.num_processes != processes:
        raise UserError(
            f"num_processes={launch.num_processes} is not {per_node} on each of {nodes} nodes",
            fix=f"--num_processes={processes}",
        )
    grace = DEFAULT_GRACE if cluster.grace_seconds is None else cluster.grace_seconds
    own = [f"--grace_seconds={grace}"] if cluster.grace_seconds is None else []
    own += [f"--stop_before={STOP_BEFORE}"] if limited and cluster.stop_before is None else []
    return Job(
        name=job_name(name or (run.output_dir.name if run.output_dir is not None else "") or "smalti"),
        words=(*words, *own),
        directory=str(run.output_dir),
        nodes=nodes,
        processes=processes,
        gpus=0 if launch.use_cpu else per_node,
        grace=grace,
        elastic=is_elastic(config),
    )


def job_name(text: str) -> str:
    """A name that schedulers and host names accept: lower-case letters, digits and "-", at most 50, from a letter on."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"smalti-{name}")[:50].strip("-")


def comment(text: str) -> str:
    """The text in one line, for a comment; "?" for what is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def yaml_of(documents: Sequence[object]) -> str:
    """Documents as YAML. Texts of several lines, such as configuration files, are written as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes printable texts of several lines in literal style."""

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        plain = text.replace("\n", "").isprintable()
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=("|" if "\n" in text else None) if plain else '"')

    Dumper.add_representer(str, represent)
    text: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
