"""Whether a way to train fits on a device: what was counted, allowances for the rest, and the uncertainty of both.

Importing this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smalti.parallel import DeviceModel
from smalti_plan.records import Rehearsal

FitLevel = Literal["fits", "tight", "does not fit"]
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Memory that no count sees, as a range in bytes, or as a share of what was counted. `source` says where it is from."""

    name: str
    least: float
    most: float
    source: str
    share: bool = False
    several: bool = False
    """Only with several ranks."""


ALLOWANCES = (
    Allowance(name="context", least=0.3 * _GIB, most=0.7 * _GIB, source="CUDA context, kernels of torch: nvidia-smi"),
    Allowance(name="NCCL", least=0.2 * _GIB, most=2.0 * _GIB, several=True, source="NCCL: buffers of communicators"),
    Allowance(name="workspaces", least=0.03 * _GIB, most=1.0 * _GIB, source="cuBLAS (32 MiB on Hopper), cuDNN, attention"),
    Allowance(name="fragmentation", least=0.0, most=0.08, share=True, source="estimate for expandable segments"),
)
"""For accelerators."""
HOST_PROCESS = Allowance(name="process", least=0.5 * _GIB, most=1.0 * _GIB, source="libraries and buffers of a process")
UNCERTAINTY = {"formula": (0.12, 0.12), "modelled": (0.02, 0.05), "rehearsed": (0.02, 0.05)}
"""By which shares a count may be too high or too low: against rehearsals, and rehearsals against real ranks (bench)."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`least` and `most` are the bytes that a rank may need at its peak, allowances included, and `level` what that means.

    `host` is the host memory of all ranks of a node.
    """

    level: FitLevel
    least: int
    most: int
    memory: int
    host: int = 0


def fit_of(counted: Rehearsal, device: DeviceModel, *, local_ranks: int) -> Fit:
    """Fits: even the most does. Tight: the least does. Host memory is reported and not judged: it is that of other machines."""
    peak = counted.peak.total
    too_high, too_low = UNCERTAINTY[counted.counted]
    least, most = peak * (1 - too_high), peak * (1 + too_low)
    for each in allowances(device, counted.ranks):
        least += each.least * (peak if each.share else 1)
        most += each.most * (peak if each.share else 1)
    level: FitLevel = "fits" if most <= device.memory else "tight" if least <= device.memory else "does not fit"
    host = max([counted.resident_host, *(each.host for each in counted.phases.values())])
    return Fit(level=level, least=int(least), most=int(most), memory=device.memory, host=host * local_ranks)


def allowances(device: DeviceModel, ranks: int) -> tuple[Allowance, ...]:
    """Those that count on this device for this number of ranks."""
    if device.kind == "cpu":
        return (HOST_PROCESS,)
    return tuple(each for each in ALLOWANCES if ranks > 1 or not each.several)
