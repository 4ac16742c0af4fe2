"""How fast a device and a disk are now: `python -m smalti_doctor.measure INDEX SECONDS` prints a `Measurement` as JSON.

Call `measure_device` in a child process: it opens a context on the device, and a device that hangs does not return.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from smalti.system import die_with_parent
from smalti_doctor.checks.processor import processor_name

if TYPE_CHECKING:
    import torch

SECONDS = 10.0
_ROUNDS = 5
_COPIED = 256 << 20
_DISK_BLOCK = 16 << 20
_DISK_MOST = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One device. `products` are FLOP/s of matrix products by precision; bandwidths are bytes per second, None on the CPU.

    `memory` is the bandwidth of the device's own memory: bytes that are read and written by a copy within it. `device` is its
    identity, which stays the same when devices are numbered otherwise: the UUID, or the host name for the CPU.
    """

    device: str
    name: str
    kind: str
    index: int
    products: Mapping[str, float]
    memory: float
    to_device: float | None = None
    from_device: float | None = None
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class DiskMeasurement:
    """Bytes per second of one large file. `write` includes the fsync, `read` is after the file has left the page cache."""

    folder: str
    write: float
    read: float


def measure_device(index: int, seconds: float = SECONDS) -> Measurement:
    """Measure products, copies and memory of this device for about this time; of the CPU if torch sees no accelerator.

    Medians of some rounds, so that one disturbance does not count. Raises RuntimeError for a device that cannot compute.
    """
    import torch

    from smalti.parallel import use_device

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None else "cpu"
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    use_device(str(device))
    precisions = _precisions(kind)
    share = seconds / (len(precisions) + (1 if kind == "cpu" else 3))
    found = {name: _products(device, name, share) for name in precisions}
    memory = _within(device, share)
    copies = (None, None) if kind in ("cpu", "mps") else _copies(device, share)
    name, identity = _identity(device)
    return Measurement(
        device=identity,
        name=name,
        kind=kind,
        index=index,
        products=found,
        memory=memory,
        to_device=copies[0],
        from_device=copies[1],
    )


def measure_disk(folder: Path, seconds: float = SECONDS) -> DiskMeasurement:
    """Write, sync and read one file in this folder for about this time. The file is removed. Raises OSError."""
    block = os.urandom(_DISK_BLOCK)  # not zeros, which some file systems do not store
    with tempfile.TemporaryFile(prefix=".smalti-doctor-", dir=folder, buffering=0) as file:
        begun, written = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds / 3 and written < _DISK_MOST:
            written += file.write(block)
        os.fsync(file.fileno())
        write_rate = written / (time.perf_counter() - begun)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun, read = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds and (chunk := file.read(_DISK_BLOCK)):
            read += len(chunk)
        return DiskMeasurement(folder=str(folder), write=write_rate, read=read / (time.perf_counter() - begun))


def _precisions(kind: str) -> list[str]:
    """bf16 only where it is native; TF32 only where there is such a thing."""
    import torch

    from smalti.parallel import native_bf16

    found = ["fp32"]
    if native_bf16(kind).native:
        found.insert(0, "bf16")
    if kind == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 8:
        found.append("tf32")
    return found


def _products(device: torch.device, precision: str, seconds: float) -> float:
    import torch

    size = 1024 if device.type == "cpu" else 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        with torch.no_grad():
            return 2 * size**3 * _rate(lambda: torch.mm(first, second, out=out), device, seconds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _within(device: torch.device, seconds: float) -> float:
    import torch

    source = torch.empty(_bytes_to_copy(device), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() * _rate(lambda: target.copy_(source), device, seconds)


def _copies(device: torch.device, seconds: float) -> tuple[float, float]:
    """To the device, and from it. Host memory is pinned where it can be."""
    import torch

    from smalti.parallel import pins_memory

    size = _bytes_to_copy(device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=pins_memory(device.type)).fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    to_device = _rate(lambda: there.copy_(here, non_blocking=True), device, seconds)
    from_device = _rate(lambda: here.copy_(there, non_blocking=True), device, seconds)
    return size * to_device, size * from_device


def _bytes_to_copy(device: torch.device) -> int:
    """Larger than caches; less where the device has little free memory."""
    import torch

    if device.type == "cpu":
        return _COPIED
    with suppress(AttributeError, RuntimeError):
        return max(1 << 20, min(_COPIED, int(torch.get_device_module(device.type).mem_get_info(device)[0]) // 8))
    return _COPIED


def _rate(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """How often a second it is done: the median of some rounds of about the same time, after one that warms up."""
    count, taken = 1, _time(work, device, 1)
    taken = _time(work, device, 1)
    while taken < seconds / _ROUNDS / 4:
        count *= 2
        taken = _time(work, device, count)
    count = max(1, int(count * seconds / _ROUNDS / taken))
    return count / median(_time(work, device, count) for _ in range(_ROUNDS))


def _time(work: Callable[[], object], device: torch.device, count: int) -> float:
    import torch

    begun = time.perf_counter()
    for _ in range(count):
        work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begun


def _identity(device: torch.device) -> tuple[str, str]:
    """Its name, and what identifies it."""
    import torch

    if device.type == "cpu":
        return processor_name(), f"{socket.gethostname()} cpu"
    module = torch.get_device_module(device.type)
    name = str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    with suppress(AttributeError, RuntimeError):
        return name, str(module.get_device_properties(device).uuid)
    return name, f"{socket.gethostname()} {device}"


if __name__ == "__main__":
    die_with_parent()
    print(json.dumps(asdict(measure_device(int(sys.argv[1]), float(sys.argv[2])))))
