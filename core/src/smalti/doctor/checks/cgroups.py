"""The limits that a container or a job has: cgroups of Linux, version 2 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes a number about as large as this for no limit."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest limit in bytes of this process's group and those above it; None if there is none."""
    limits = [int(text) for text in _values(root, "memory.max", "memory", "memory.limit_in_bytes") if text.isdecimal()]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def memory_used(root: Path = Path("/")) -> int | None:
    """What counts against the limit of the own group, with the page cache; None if unknown."""
    return next(
        (int(text) for text in _values(root, "memory.current", "memory", "memory.usage_in_bytes") if text.isdecimal()), None
    )


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The number of processors that this process's group may use; None if there is no limit."""
    quotas = []
    for text in _values(root, "cpu.max", "", ""):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    for quota, period in zip(
        _values(root, "", "cpu", "cpu.cfs_quota_us"), _values(root, "", "cpu", "cpu.cfs_period_us"), strict=False
    ):
        if quota.isdecimal() and period.isdecimal():  # -1 is no limit
            quotas.append(int(quota) / int(period))
    return round(min(quotas), 2) if quotas else None


def _values(root: Path, name: str, controller: str, old_name: str) -> Iterator[str]:
    """What a file has in this process's group and in those above it, from the innermost on."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and name:
            base, file = root / "sys/fs/cgroup", name
        elif controller and controller in controllers.split(","):
            base, file = root / "sys/fs/cgroup" / controller, old_name
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            if text := _text(base.joinpath(*parts[:count], file)):
                yield text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
