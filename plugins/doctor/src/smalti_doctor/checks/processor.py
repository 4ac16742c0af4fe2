"""The processors: their instructions, and how many of them this process may use."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from smalti import Finding
from smalti_doctor.checks.cgroups import cpu_quota
from smalti_doctor.report import Section

_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
"""The flags in /proc/cpuinfo that decide how fast matrix products are, of x86 and ARM."""


def processor(root: Path = Path("/")) -> Section:
    """`root` is where /proc and /sys are."""
    text = _read(root / "proc/cpuinfo")
    flags = set((_field(text, "flags") or _field(text, "Features")).split())
    found = [title for name, title in _INSTRUCTIONS.items() if name in flags]
    present, quota = os.cpu_count() or 1, cpu_quota(root)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    usable = min(allowed, quota) if quota is not None else float(allowed)
    facts = {
        "name": processor_name(root),
        "count": present,
        "allowed": allowed,
        "quota": quota,
        "usable": usable,
        "instructions": found,
    }
    return Section(name="processor", facts=facts, findings=list(_findings(facts["name"], present, usable, found, bool(flags))))


def processor_name(root: Path = Path("/")) -> str:
    return _field(_read(root / "proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _findings(name: object, present: int, usable: float, found: list[str], known: bool) -> Iterator[Finding]:
    limited = "" if usable >= present else f", of which this process may use {usable:g}"
    message = f"{name}, {present} logical processors{limited}; {', '.join(found) or 'no vector instructions known'}"
    if known and platform.machine() in ("x86_64", "AMD64") and "AVX2" not in found:
        fix = "let the virtual machine pass the instructions of its host (CPU type host-passthrough)"
        yield Finding(
            check="processor", level="warning", message=f"{message}: without AVX2 everything on the CPU is slow", fix=fix
        )
    else:
        yield Finding(check="processor", level="ok", message=message)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        message = f"OMP_NUM_THREADS={threads}, but this process may use {usable:g} processors: threads wait for each other"
        yield Finding(check="processor", level="warning", message=message, fix=f"export OMP_NUM_THREADS={max(1, int(usable))}")


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
