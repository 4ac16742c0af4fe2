"""Where the accelerators are: their PCIe links, the processors near them, and hugepages of the host."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from smalti import Finding
from smalti_doctor.report import Section

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_CLASSES = ("0x03", "0x12")
"""Displays and 3D controllers, and accelerators: how the class of a PCI device begins."""
_WIDEST = 32
"""A link that reports more lanes reports nothing: 63 or 255 stand for an unknown width."""


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """A GPU on the PCI bus. `node` is its NUMA node and `near` the processors there; None and empty if unknown.

    Widths are in lanes, 0 if unknown; speeds are as the kernel names them, such as "16.0 GT/s PCIe".
    """

    address: str
    vendor: str
    node: int | None
    near: tuple[int, ...]
    width: int
    widest: int
    speed: str
    fastest: str

    def __str__(self) -> str:
        return f"the {self.vendor} GPU at {self.address}"


def topology(root: Path = Path("/"), *, allowed: Collection[int] | None = None) -> Section:
    """`root` is where /sys is, `allowed` the processors that this process may use; by default what the system says."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    gpus, nodes = list(_gpus(root)), len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    pages = _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    facts = {"gpus": [asdict(gpu) for gpu in gpus], "numa_nodes": nodes, "transparent_hugepages": pages or None}
    findings = [*_of_links(gpus), *_of_numa(gpus, nodes, set(allowed)), *_of_pages(pages)]
    return Section(name="topology", facts=facts, findings=findings)


def _gpus(root: Path) -> Iterator[PciDevice]:
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(_text(folder / "vendor"))
        if vendor is None or not _text(folder / "class").startswith(_CLASSES):
            continue
        node = _text(folder / "numa_node")
        yield PciDevice(
            address=folder.name,
            vendor=vendor,
            node=int(node) if node.isdecimal() else None,  # -1 is unknown
            near=tuple(_processors(_text(folder / "local_cpulist"))) if node.isdecimal() else (),
            width=_lanes(_text(folder / "current_link_width")),
            widest=_lanes(_text(folder / "max_link_width")),
            speed=_text(folder / "current_link_speed"),
            fastest=_text(folder / "max_link_speed"),
        )


def _of_links(gpus: Sequence[PciDevice]) -> Iterator[Finding]:
    """Only the width tells something at rest: drivers lower the speed of a link that is not used."""
    for gpu in gpus:
        if 0 < gpu.width < gpu.widest:
            message = f"{gpu} has {gpu.width} PCIe lanes of {gpu.widest}: copies to and from it are slower"
            fix = "put it into a slot with all lanes, seat it and its riser again, and look into `lspci -vv` and the BIOS"
            yield Finding(check="PCIe", level="warning", message=message, fix=fix)
    known = [gpu for gpu in gpus if gpu.width and gpu.width >= gpu.widest]
    if known:
        slow = [gpu for gpu in known if gpu.speed and gpu.fastest and gpu.speed != gpu.fastest]
        message = f"{len(known)} of {len(gpus)} GPUs have all lanes of their PCIe links"
        if slow:
            message += f"; now at {slow[0].speed}, at most {slow[0].fastest} (a link that is not used is slower)"
        yield Finding(check="PCIe", level="ok", message=message)


def _of_numa(gpus: Sequence[PciDevice], nodes: int, allowed: Collection[int]) -> Iterator[Finding]:
    if nodes < 2 or not gpus:
        return
    far = [gpu for gpu in gpus if gpu.near and allowed and not set(gpu.near) & set(allowed)]
    for gpu in far:
        message = f"{gpu} is on NUMA node {gpu.node}, and this process may use no processor there: its data takes a detour"
        fix = "let the scheduler or container give processors of that node (srun --cpu-bind=none, docker run --cpuset-cpus)"
        yield Finding(check="NUMA", level="warning", message=message, fix=fix)
    if not far:
        found = sorted({gpu.node for gpu in gpus if gpu.node is not None})
        where = f"GPUs on {', '.join(map(str, found))}" if found else "which of them the GPUs are on is unknown"
        hint = "`enable_cpu_affinity: true` in the Accelerate YAML binds ranks to the processors near their GPUs"
        yield Finding(check="NUMA", level="ok", message=f"{nodes} NUMA nodes; {where}; {hint}")


def _of_pages(pages: str) -> Iterator[Finding]:
    if pages == "never":
        message = "transparent hugepages are off: offloaded weights and large tensors in host memory are slower"
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(check="hugepages", level="warning", message=message, fix=fix)
    elif pages:
        yield Finding(check="hugepages", level="ok", message=f"transparent hugepages: {pages}")


def _lanes(text: str) -> int:
    return int(text) if text.isdecimal() and int(text) <= _WIDEST else 0


def _processors(text: str) -> Iterator[int]:
    """The numbers of "0-3,8"; none for text that is not such a list."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), int(last or first) + 1)


def _chosen(text: str) -> str:
    """The word in brackets of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
