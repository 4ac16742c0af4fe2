"""What a node has that the others must have too, as JSON. Imports no torch: versions come from the installed packages."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import psutil

from smalti_cluster.checks.channel import Message

_PACKAGES = ("torch", "accelerate", "deepspeed", "diffusers")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_RESOLVE_SECONDS = 3.0
_MOST_ENTRIES = 10_000


def node_facts(
    *,
    values: Mapping[str, object],
    plugins: Sequence[str],
    devices: Mapping[str, object],
    interface: tuple[str, str],
    data: Mapping[str, Path],
) -> Message:
    """The facts of this node.

    `interface` is the name and the own address of that through which node 0 is reached. `data` are local folders by dataset.
    `devices` has "kind", "count", "name" and "text", or a "problem".
    """
    return {
        "host": socket.gethostname(),
        "user": f"{os.getuid()}:{os.getgid()}" if hasattr(os, "getuid") else "",
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "driver": _driver(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "nccl": next((found for name in _NCCL if (found := _version(name))), ""),
        "plugins": list(plugins),
        "values": dict(values),
        "devices": dict(devices),
        "memory": psutil.virtual_memory().total,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "name": own_name_addresses(),
        "interface": interface_facts(*interface),
        "infiniband": infiniband_ports(),
        "data": {name: _entries(place) for name, place in data.items()},
    }


def own_name_addresses() -> list[str]:
    """The addresses to which this node resolves its own name; none if it does not within a few seconds."""
    found: list[str] = []

    def resolve() -> None:
        with suppress(OSError):
            found.extend({str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)})

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)  # a name server may not answer for long
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return sorted(found)


def interface_facts(name: str, address: str) -> Message:
    """A network interface of this node with its speed in Mbit/s (0: unknown) and its MTU."""
    state = psutil.net_if_stats().get(name)
    return {"name": name, "address": address, "speed": state.speed if state else 0, "mtu": state.mtu if state else 0}


def infiniband_ports(base: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The ports of InfiniBand and RoCE devices, such as "mlx5_0/1: 4: ACTIVE, 400 Gb/sec (4X NDR)"."""
    found = []
    for port in sorted(base.glob("*/ports/*")):
        texts = [_text(port / name) for name in ("state", "rate", "link_layer")]
        found.append(f"{port.parts[-3]}/{port.name}: {', '.join(filter(None, texts))}")
    return found


def _entries(place: Path) -> Message:
    """How many entries a folder has, counted up to a limit; a file has its size."""
    try:
        if place.is_file():
            return {"path": str(place), "bytes": place.stat().st_size}
        with os.scandir(place) as entries:
            return {"path": str(place), "entries": sum(1 for _ in islice(entries, _MOST_ENTRIES))}
    except OSError as error:
        return {"path": str(place), "problem": error.strerror or str(error)}


def _driver() -> str:
    """The version of NVIDIA's or AMD's kernel driver; "" if neither is loaded."""
    text = _text(Path("/proc/driver/nvidia/version"))
    words = text.split()
    if "Module" in words:
        return next((word for word in words[words.index("Module") :] if word[:1].isdigit()), "")
    return _text(Path("/sys/module/amdgpu/version"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
