"""Runs of the toy family over the nodes of a `Cluster`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti.rundir import RunDirectory

from ..images import images_in
from .cluster import Cluster, NodeProcess

TINY: Mapping[str, object] = {
    "model_family": "toy",
    "toy_width": 32,
    "toy_depth": 2,
    "toy_heads": 2,
    "resolution": 16,
    "resolution_type": "pixel",
    "mixed_precision": "no",
    "learning_rate": 1e-3,
    "checkpoint_step_interval": 0,
    "without": "plots",
    "use_cpu": True,
    "train_batch_size": 1,
    "max_train_steps": 100_000,
}
PORT = 29500


def _each(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


class Run:
    """`smalti train` on some nodes, two ranks on each if not said otherwise. Node 0 of the launch is the first one."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        *,
        nodes: Sequence[int] = (0, 1),
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        own_env: Mapping[int, Mapping[str, str]] | None = None,
        clocks: Mapping[int, float] | None = None,
        own: Mapping[int, Mapping[str, object]] | None = None,
        **options: object,
    ) -> None:
        """`own` and `own_env` are of single nodes. An option that is None is left out, one that is a list is repeated."""
        self.cluster = cluster
        self.directory = directory
        self.ranks = ranks * len(nodes)
        self._began = time.time()
        launch: dict[str, object] = {"num_processes": self.ranks}
        if len(nodes) > 1:
            address = cluster.address(nodes[0])
            launch |= {"num_machines": len(nodes), "main_process_ip": address, "main_process_port": PORT}
        self.processes: list[NodeProcess] = []
        self._commands: list[tuple[int, list[str], dict[str, str]]] = []
        for rank, node in enumerate(nodes):
            place = {"machine_rank": rank} if len(nodes) > 1 else {}
            data = {"instance_data_dir": images_in(cluster.place / "images", 12, (24, 24)), "output_dir": directory}
            values = {**TINY, **data, **launch, **place, **options, **(own or {}).get(node, {})}
            words = [f"--{name}={each}" for name, value in values.items() for each in _each(value)]
            command = [sys.executable, "-m", "smalti", "train", *words]
            variables = {"HF_HOME": str(cluster.place / "hf"), **(env or {}), **(own_env or {}).get(node, {})}
            clock = (clocks or {}).get(node, 0)
            self.processes.append(cluster.start(node, command, env=variables, clock=clock))
            self._commands.append((node, command, variables))

    def start_again(self, rank: int) -> NodeProcess:
        """A node of the launch that was lost comes back, with the same command."""
        node, command, variables = self._commands[rank]
        self.processes[rank] = self.cluster.start(node, command, env=variables)
        return self.processes[rank]

    @property
    def step(self) -> int:
        """The last one of this launch."""
        last = RunDirectory(self.directory).latest("step")
        return last.step or 0 if last is not None and last.time > self._began else 0

    def wait_for_step(self, step: int, seconds: float = 120) -> int:
        """Until the events have this step, which is returned; RuntimeError with the output if a node ends before."""
        deadline = time.monotonic() + seconds
        while (found := self.step) < step:
            if time.monotonic() > deadline or any(each.poll() is not None for each in self.processes):
                raise RuntimeError(f"step {step} never came, the last was {found}: {self.outputs()}")
            time.sleep(0.02)
        return found

    def codes(self, seconds: float = 180) -> list[int]:
        """The exit codes of all nodes, when all have ended."""
        return [each.wait(seconds) for each in self.processes]

    def outputs(self) -> list[str]:
        return [each.output for each in self.processes]
