"""Memory of the host, of the container, and what may be opened and locked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from smalti import Finding
from smalti.system import format_bytes
from smalti_doctor.checks.cgroups import memory_limit
from smalti_doctor.report import Section

_GIB = 1 << 30
_LITTLE_MEMORY = 4 * _GIB
_LITTLE_SHARED_MEMORY = 512 << 20
_FEW_FILES = 4096


def memory(root: Path = Path("/"), *, has_infiniband: bool | None = None) -> Section:
    """`root` is where /proc and /sys are. `has_infiniband` is found out by default."""
    host, group = psutil.virtual_memory(), memory_limit(root)
    limit = group.limit if group is not None and group.limit < host.total else None
    available = host.available if group is None else min(host.available, group.available)
    shared = _shared_memory(Path("/dev/shm"))
    facts: dict[str, object] = {
        "total": host.total,
        "available": available,
        "swap": psutil.swap_memory().total,
        "limit": limit,
        "shared_memory": shared,
    }
    infiniband = any((root / "sys/class/infiniband").glob("*")) if has_infiniband is None else has_infiniband
    findings = [*_of_host(host.total, available, limit), *_of_shared_memory(shared)]
    if sys.platform != "win32":
        import resource

        limits = {name: resource.getrlimit(number) for name, number in _resources().items()}
        unlimited = resource.RLIM_INFINITY
        facts |= {name: [None if value == unlimited else value for value in pair] for name, pair in limits.items()}
        findings += _of_limits(limits["open_files"], limits["locked_memory"], unlimited, infiniband=infiniband)
    return Section(name="memory", facts=facts, findings=findings)


def _resources() -> dict[str, int]:
    import resource

    return {"open_files": resource.RLIMIT_NOFILE, "locked_memory": resource.RLIMIT_MEMLOCK}


def _of_host(total: int, available: int, limit: int | None) -> Iterator[Finding]:
    of = f"{format_bytes(total)} of the host" if limit is None else f"the {format_bytes(limit)} that this container may use"
    host = "" if limit is None else f"; the host has {format_bytes(total)}"
    message = f"{format_bytes(available)} free of {of}{host}"
    if available < _LITTLE_MEMORY:
        fix = "raise the memory limit of the container or job" if limit is not None else "end other programs"
        yield Finding(check="memory", level="warning", message=message, fix=fix)
    else:
        yield Finding(check="memory", level="ok", message=message)


def _shared_memory(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return status.f_blocks * status.f_frsize


def _of_shared_memory(size: int | None) -> Iterator[Finding]:
    if size is None:
        return
    if size < _LITTLE_SHARED_MEMORY:
        message = f"/dev/shm has only {format_bytes(size)}: NCCL needs it for several GPUs on a node"
        fix = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
        yield Finding(check="shared memory", level="warning", message=message, fix=fix)
    else:
        yield Finding(check="shared memory", level="ok", message=f"/dev/shm has {format_bytes(size)}")


def _of_limits(files: tuple[int, int], locked: tuple[int, int], unlimited: int, *, infiniband: bool) -> Iterator[Finding]:
    soft, hard = files
    most = "no limit" if hard == unlimited else f"at most {hard:,}"
    message = f"{soft:,} now, {most}; smalti raises it to what is allowed"
    if hard != unlimited and hard < _FEW_FILES:
        fix = "ulimit -Hn 65536, LimitNOFILE=65536 of the service, or docker run --ulimit nofile=65536"
        yield Finding(check="open files", level="warning", message=f"{message}: too few for many ranks", fix=fix)
    else:
        yield Finding(check="open files", level="ok", message=message)
    if infiniband and locked[1] != unlimited:
        message = f"at most {format_bytes(locked[1])} of memory can be locked: NCCL cannot register memory with InfiniBand"
        fix = "ulimit -l unlimited, LimitMEMLOCK=infinity of slurmd, or docker run --ulimit memlock=-1"
        yield Finding(check="locked memory", level="warning", message=message, fix=fix)
