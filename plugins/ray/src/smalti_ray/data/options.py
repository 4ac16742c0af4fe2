"""Options of commands that work on a cluster rather than on this machine. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option

ADDRESS_HELP = "The Ray cluster: HOST:PORT of its head. Default: the variable RAY_ADDRESS, or the cluster of this node."


class EngineOptions(Options):
    engine: Literal["local", "ray"] = option(
        "local",
        help="Where `smalti cache encode` and `smalti dataset scan` work: `local` on this node, or `ray` on a cluster.",
        level="advanced",
    )
    address: str | None = option(
        None,
        help=ADDRESS_HELP,
        level="advanced",
        when="engine == ray",
    )
    engine_workers: int | None = option(
        None,
        help="Most workers of the engine. Default: as many as the cluster has room for.",
        level="advanced",
        when="engine == ray",
        ge=1,
    )
    engine_cpus: float = option(
        1.0, help="CPUs that each worker of the engine reserves.", level="advanced", when="engine == ray", gt=0
    )
    engine_gpus: float = option(
        1.0,
        help="GPUs, or a share of one, that each worker reserves to encode. With `use_cpu`, none is reserved.",
        level="advanced",
        when="engine == ray",
        gt=0,
    )
    engine_wait: float = option(
        300.0,
        help="Seconds to wait until the cluster has room for a first worker. 0 waits without limit.",
        level="advanced",
        when="engine == ray",
        ge=0,
    )


GROUP = OptionGroup(name="engine", title="Scans and encodings on a cluster", options=EngineOptions)
