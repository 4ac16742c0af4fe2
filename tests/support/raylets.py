"""A Ray cluster on this machine: several raylets as its nodes, with workers in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.utils
from ray._private import services
from ray._private.node import Node
from ray.cluster_utils import Cluster

_STORE_BYTES = 80 * 2**20
_AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_LEAST = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""A node without the forwarding of logs and the autoscaler."""
_PATIENCE = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "300",
    "RAY_raylet_client_connect_timeout_milliseconds": "300000",
}
"""For a machine that is busy with other tests."""
_START_SECONDS = 300.0


def _free_ports() -> dict[str, int]:
    """A port for each agent of a raylet: with given ones, it does not wait for its agents before it starts."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in _AGENTS]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return dict(zip(_AGENTS, (each.getsockname()[1] for each in sockets), strict=True))


@contextmanager
def _core_alone() -> Iterator[None]:
    """Nodes start as where Ray is installed without its dashboard, and have as long for it as a busy machine takes."""
    of_node, start = services.get_node, Node.start_ray_processes

    def start_at_once(node: Node) -> None:
        """A raylet gives its agent 15 seconds to say at which port it listens, which is known here."""
        port = node._ray_params.dashboard_agent_listen_port
        Path(node._session_dir, f"dashboard_agent_listen_port_{node._node_id}").write_text(f"{port}")
        start(node)

    def patient(address: str, node: str) -> Any:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return of_node(address, node)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _PATIENCE.items():
            patch.setenv(name, value)
        patch.setattr(Node, "start_ray_processes", start_at_once)
        patch.setattr(Node, "start_api_server", lambda *arguments, **settings: None)
        patch.setattr(ray._private.utils, "get_dashboard_dependency_error", lambda: ImportError("left out"))
        patch.setattr(services, "get_node", patient)
        yield


def add_raylet(cluster: Cluster, *, cpus: float) -> Any:
    """Start another node. Raises what Ray raises if it does not start."""
    with _core_alone():
        return cluster.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES, **_LEAST, **_free_ports())


@contextmanager
def ray_cluster(cpus: tuple[float, ...]) -> Iterator[Cluster]:
    """A cluster whose nodes have these numbers of CPUs; the first one is the head. All its processes end with the block."""
    cluster = Cluster()
    try:
        for each in cpus:
            add_raylet(cluster, cpus=each)
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        processes = [one for node in _nodes(cluster) for kind in node.all_processes.values() for one in kind]
        with suppress(Exception):  # a node that was killed is no longer there to be stopped
            cluster.shutdown()
        for each in processes:
            with suppress(ProcessLookupError):
                os.kill(each.process.pid, signal.SIGKILL)


def kill_raylet(node: Any) -> None:
    """End a node as a power failure does: its raylet and its workers."""
    (raylet,) = node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGKILL)


def _nodes(cluster: Cluster) -> list[Any]:
    return [*([cluster.head_node] if cluster.head_node else []), *cluster.worker_nodes]
