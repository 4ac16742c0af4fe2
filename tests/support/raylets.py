"""A real Ray cluster of several raylets on this machine, in a process of its own that ends with all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

HOST = """
import ctypes
import json
import os
import socket
import sys
import threading
import time
from ray.cluster_utils import Cluster

nodes = []

def reap():
    while True:  # a killed raylet that nobody waits for counts as alive, and its workers would stay
        for each in list(nodes):
            each.all_processes["raylet"][0].process.poll()
        time.sleep(0.2)

threading.Thread(target=reap, daemon=True).start()

def rename(host):
    if ctypes.CDLL(None, use_errno=True).unshare(0x04000000):  # names of hosts of its own, for what this thread starts
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)

def patiently(start):
    for _ in range(3):
        try:
            return start()
        except Exception as error:  # a part of it was too slow for Ray's fixed 15 s
            print(error, file=sys.stderr, flush=True)
    return start()

cluster = None
for line in sys.stdin:
    wanted = json.loads(line)
    if cluster is None:
        cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **wanted["head"]}))
    if wanted["host"]:
        rename(wanted["host"])
    given = {"num_cpus": wanted["cores"], "env_vars": wanted["variables"], "object_store_memory": 80_000_000}
    node = patiently(lambda: cluster.add_node(**given))
    nodes.append(node)
    print(cluster.address, node.node_id, node.all_processes["raylet"][0].process.pid, flush=True)
"""
"""Adds a raylet for each line of JSON, and writes the address of the cluster, the node's id and the raylet's process."""
_PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "40",
    "RAY_worker_register_timeout_seconds": "120",
}


def environment() -> dict[str, str]:
    """For Ray's processes: nothing of the tests' own settings, this installation on the path, and more time to start."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("SMALTI_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**others, **_PATIENT, "PATH": path}


class Raylets:
    """Close it: that kills every process of the cluster. With `dashboard` it takes jobs, which needs `ray[default]`."""

    def __init__(self, folder: Path, *, dashboard: bool = False) -> None:
        self.address = ""
        self._dashboard = free_port() if dashboard else None
        self.nodes: list[tuple[str, int]] = []
        self._log = (folder / "cluster.log").open("w")
        self._host = subprocess.Popen(
            [sys.executable, "-c", HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        with suppress(OSError):  # Ray gives each of its parts 15 s to start, on a machine with other tests too
            Path(f"/proc/{self._host.pid}/autogroup").write_text("-10")

    @property
    def session(self) -> int:
        """The session of all processes of the cluster."""
        return self._host.pid

    @property
    def jobs(self) -> str:
        """Where `ray job` submits to."""
        return f"http://127.0.0.1:{self._dashboard}"

    def add(self, cores: int = 1, host: str = "", **variables: str) -> None:
        """A further raylet with this number of cores, and variables of its environment that others do not have.

        It and those after it have the name `host`, which takes the rights of root; all have that of the machine without it.
        """
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        head = {"include_dashboard": self._dashboard is not None}
        head |= {} if self._dashboard is None else {"dashboard_port": self._dashboard}
        wanted = {"head": head, "cores": cores, "host": host, "variables": variables}
        self._host.stdin.write(json.dumps(wanted) + "\n")
        self._host.stdin.flush()
        answer = self._host.stdout.readline().split()
        if len(answer) != 3:
            raise RuntimeError(f"no raylet was started: {Path(self._log.name).read_text()}")
        self.address = answer[0]
        self.nodes.append((answer[1], int(answer[2])))

    def kill(self, number: int) -> None:
        """End a raylet at once, which Ray's processes on its node notice."""
        psutil.Process(self.nodes[number][1]).kill()

    def lose(self, number: int) -> None:
        """End a raylet and all that runs on its node at once, as when its machine is lost."""
        raylet = self.nodes[number][1]
        for each in [each for each in psutil.process_iter() if _raylet_of(each) == raylet or each.pid == raylet]:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def drain(self, number: int) -> None:
        """Announce that a node will be taken away, as a cloud does before it ends a spot machine."""
        command = ["ray", "drain-node", "--address", self.address, "--node-id", self.nodes[number][0]]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:], *reason], check=True, env=environment())

    def node_of(self, process: psutil.Process) -> int:
        """The node on which a worker of Ray runs."""
        return [raylet for _, raylet in self.nodes].index(_raylet_of(process))

    def worker(self, function: str = "run") -> tuple[int, psutil.Process]:
        """A node on which this function of an actor runs, with the process of it."""
        for number, (_, raylet) in enumerate(self.nodes):
            for each in psutil.Process(raylet).children(recursive=True) if psutil.pid_exists(raylet) else ():
                with suppress(psutil.Error):
                    if " ".join(each.cmdline()).rstrip().endswith(f".{function}"):
                        return number, each
        raise RuntimeError("no actor runs")

    def close(self) -> None:
        members = [each for each in psutil.process_iter() if _session_of(each.pid) == self.session]
        for each in members:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._host.wait()
        for pipe in (self._host.stdin, self._host.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._log.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _raylet_of(process: psutil.Process) -> int:
    """The raylet that has started a process, or the worker of Ray from which it comes; 0 if none has."""
    with suppress(psutil.Error):
        return int(process.environ().get("RAY_RAYLET_PID", "0"))
    return 0


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0
