"""The connection of a command to a Ray cluster, and what its nodes must have in common with it."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

from smalti import UserError

_SECONDS = 10.0
_START = "start one with `ray start --head`, or give the address of its head: --address=HOST:6379"


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Within the block, this process is a driver of the cluster at `address` (None: RAY_ADDRESS, or the one of this machine).

    Raises UserError if there is none, or if it runs other versions of Ray or Python.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        reason = " ".join(f"{error}".split())
        if "ersion mismatch" in reason:
            fix = "install the versions of the cluster here, or those of this machine there"
            raise UserError(f"the Ray cluster {where} has other versions: {reason}", fix=fix) from error
        raise UserError(
            f"cannot use a Ray cluster {where}: {reason}", fix=f"{_START}; and run this on one of its nodes"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raises UserError where nothing listens: Ray itself would try for minutes."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        fix = "give the address of its head, HOST:6379, on one of its nodes; or: ray job submit -- smalti ..."
        raise UserError(f"{address} is an address for Ray's client, with which workers cannot be watched", fix=fix)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{address!r} is not an address of a Ray cluster", fix="--address=HOST:PORT, for example head:6379")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {address}: {error}", fix=_START) from error


def versions() -> dict[str, str]:
    """What has to be the same on the driver and its workers: otherwise they encode, or understand each other, differently."""
    return {"Python": platform.python_version(), **{name: version(name) for name in ("ray", "torch", "smalti", "smalti-ray")}}


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raises UserError if a `node` has other versions than this process."""
    if different := [f"{name} {theirs[name]} rather than {mine}" for name, mine in versions().items() if theirs[name] != mine]:
        raise UserError(
            f"node {theirs['node']} of the Ray cluster has other versions than this one: {', '.join(different)}",
            fix="install the same packages on every node",
        )


def check_encoders(node: str, theirs: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raises UserError if a node would encode into other stores than the first one: `first` and `theirs` identify encoders."""
    if different := [kind for kind, encoder in theirs.items() if first[kind] != encoder]:
        raise UserError(
            f"node {node} encodes {' and '.join(different)} with other weights or settings than the first one",
            fix="use the same model on every node",
        )


def resources(kinds: Mapping[str, float]) -> str:
    """What the cluster has of these resources, for messages: "CPU: 8, of which 2 are free"."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return "; ".join(f"{kind}: {total.get(kind, 0):g}, of which {free.get(kind, 0):g} are free" for kind in kinds)
