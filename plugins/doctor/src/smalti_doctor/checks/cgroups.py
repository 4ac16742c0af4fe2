"""The limits that a container or a job has: cgroups of Linux, version 2 and 1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes a number about as large as this for no limit."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The limit of a group in bytes, and how much of it is free: page cache counts as free."""

    limit: int
    available: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The one with the least free memory of this process's group and those above it; None if there is none."""
    found = []
    for folder, is_old in _groups(root, "memory"):
        limit = _text(folder / ("memory.limit_in_bytes" if is_old else "memory.max"))
        used = _text(folder / ("memory.usage_in_bytes" if is_old else "memory.current"))
        if limit.isdecimal() and int(limit) < _UNLIMITED:
            held = int(used) - _page_cache(folder, "total_" if is_old else "") if used.isdecimal() else 0
            found.append(MemoryLimit(limit=int(limit), available=max(0, int(limit) - max(0, held))))
    return min(found, key=lambda each: each.available, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The number of processors that this process's group may use; None if there is no limit."""
    quotas = []
    for folder, is_old in _groups(root, "cpu"):
        if is_old:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        else:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():  # "max", or -1 in version 1, is no limit
            quotas.append(int(quota) / int(period))
    return round(min(quotas), 2) if quotas else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's groups, from the innermost to the root, and whether they are of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:count]), bool(controllers)


def _page_cache(folder: Path, prefix: str) -> int:
    """Bytes that the kernel gives back when memory is needed."""
    found = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return sum(map(int, found))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
