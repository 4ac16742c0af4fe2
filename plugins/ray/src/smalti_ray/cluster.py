"""The connection of a command to a Ray cluster, what that has, and what its nodes must have in common with the command."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import ray

from smalti import UserError

_REACH_SECONDS = 10.0
_START = "start one with `ray start --head` and give its address, --address=HOST:6379; or --address=local to start one here"


@contextmanager
def connected(address: str | None, *, log_to_driver: bool = False) -> Iterator[None]:
    """Within the block, this process is a driver of the cluster at `address` (None: RAY_ADDRESS, or the one of this machine).

    With `log_to_driver` it shows what workers print. Raises UserError if there is no cluster, or one of other versions.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this machine" if address == "auto" else f"at --address={address}"
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING, namespace="smalti")
    except OSError as error:
        raise UserError(f"there is no Ray cluster {where}: {_line(error)}", fix=_START) from error
    except (RuntimeError, ValueError) as error:
        fix = "use the same Ray and Python on the cluster and here, and start this on one of its nodes"
        raise UserError(f"the Ray cluster {where} cannot be used: {_line(error)}", fix=fix) from error
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError if nothing listens there, for Ray would try again for minutes; UserError if it is no address."""
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        fix = "start this on a node of the cluster with --address=HOST:6379, or by `ray job submit -- smalti ...`"
        raise UserError(f"--address={address} is that of a client, which cannot watch workers", fix=fix)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--address={address} is not that of a Ray cluster", fix="--address=HOST:PORT, for example head:6379")
    socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def nodes() -> list[dict[str, Any]]:
    """All nodes that the cluster has had, as Ray describes them."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def what_it_has() -> str:
    """The resources of the cluster, and how much of them is free, for messages."""
    total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
    alive = len([each for each in nodes() if each["Alive"]])
    parts = [f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU")]
    return f"the cluster has {' and '.join(parts)} on {alive} node{'' if alive == 1 else 's'}"


def versions() -> dict[str, str]:
    """What has to be the same on the driver and its workers: otherwise they compute, or understand each other, differently."""
    found = {name: version(name) for name in ("ray", "smalti", "smalti-cluster", "smalti-ray", "torch")}
    return {"Python": platform.python_version().rpartition(".")[0], **found}


def check_versions(who: str, theirs: Mapping[str, str]) -> None:
    """Raises UserError if a worker has other versions than this process. `who` it is is for the message."""
    if different := [f"{name} {theirs.get(name)}, not {mine}" for name, mine in versions().items() if theirs.get(name) != mine]:
        raise UserError(f"{who} has {'; '.join(different)}", fix="install the same versions on all nodes of the cluster")
