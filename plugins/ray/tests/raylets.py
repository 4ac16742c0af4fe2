"""A real Ray cluster of several raylets on this machine, in a process of its own that ends with all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

HOST = """
import sys
from ray.cluster_utils import Cluster

cluster, nodes = None, []
for line in sys.stdin:
    word, _, argument = line.strip().partition(" ")
    if word == "add":
        if cluster is None:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.append(cluster.add_node(num_cpus=int(argument), object_store_memory=80_000_000))
        print(cluster.address, nodes[-1].node_id, nodes[-1].all_processes["raylet"][0].process.pid, flush=True)
"""
"""Adds a raylet for each line `add CORES`, and says the address of the cluster, the node's id and the raylet's process."""
PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_health_check_failure_threshold": "30",
}


class Raylets:
    """Close it: that kills every process of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.address = ""
        self.nodes: list[tuple[str, int]] = []
        self._log = (folder / "cluster.log").open("w")
        self._host = subprocess.Popen(
            [sys.executable, "-c", HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **PATIENT},
            start_new_session=True,
        )
        with suppress(OSError):  # Ray gives each of its parts 15 s to start, on a machine with other tests too
            Path(f"/proc/{self._host.pid}/autogroup").write_text("-10")

    def add(self, cores: int = 1) -> None:
        """A further raylet with this number of cores."""
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._host.stdin.write(f"add {cores}\n")
        self._host.stdin.flush()
        answer = self._host.stdout.readline().split()
        if len(answer) != 3:
            raise RuntimeError(f"no raylet was started: {Path(self._log.name).read_text()}")
        self.address = answer[0]
        self.nodes.append((answer[1], int(answer[2])))

    def kill(self, number: int) -> None:
        """End a raylet at once, and with it the processes that it has started, as when its machine is lost."""
        raylet = psutil.Process(self.nodes[number][1])
        children = raylet.children(recursive=True)
        for each in (raylet, *children):
            each.kill()

    def processes(self, number: int) -> list[psutil.Process]:
        return psutil.Process(self.nodes[number][1]).children(recursive=True)

    def close(self) -> None:
        members = [each for each in psutil.process_iter() if _session_of(each.pid) == self._host.pid]
        for each in members:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._host.wait()
        self._log.close()


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0
