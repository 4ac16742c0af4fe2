"""The planner's answer as rows for a table and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version

from smalti.parallel import DeviceModel
from smalti_plan.calibration import Calibration
from smalti_plan.choices import Choice
from smalti_plan.fit import allowances
from smalti_plan.records import MemoryParts

SCHEMA = 1
"""Of `document`. It grows if a key changes or goes; keys may be added without that."""
TITLES = ("strategy", "recompute", "batch", "GiB per GPU", "", "counted by", "s/step", "images/s", "limited by")
RIGHT = (2, 3, 6, 7)
_GIB = 2**30
_COUNTED = {"formula": "formula", "modelled": "rehearsal", "rehearsed": "rehearsal"}


def row(choice: Choice) -> tuple[str, ...]:
    candidate, fit = choice.candidate, choice.fit
    return (
        choice.strategy.title,
        candidate.recompute,
        f"{candidate.micro_batch}x{candidate.accumulation}",
        f"{fit.least / _GIB:.1f}-{fit.most / _GIB:.1f}",
        "fails" if choice.error is not None else fit.level,
        _COUNTED[choice.counted.counted],
        f"{choice.fastest.seconds:.2g}-{choice.slowest.seconds:.2g}",
        f"{choice.samples_per_second:.3g}",
        choice.slowest.bound,
    )


def parts(choice: Choice, device: DeviceModel) -> list[str]:
    """What fills the memory at the peak, one line for each part."""
    counted, peak = choice.counted, choice.counted.peak
    lines = [f"peak in the {counted.peak_phase}: {peak.total / _GIB:.1f} GiB counted, and allowances:"]
    for each in fields(MemoryParts):
        if size := getattr(peak, each.name):
            lines.append(f"{each.name:<14}{size / _GIB:>8.2f} GiB")
    for allowance in allowances(device, counted.ranks):
        unit = peak.total / _GIB if allowance.share else 1 / _GIB
        lines.append(f"{allowance.name:<14}{f'{allowance.least * unit:.1f}-{allowance.most * unit:.1f}':>8} GiB")
    return lines


def flags(options: Mapping[str, object]) -> str:
    """Options as flags of `smalti train`."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is None:
            words.append(f"--{name}=")
        elif isinstance(value, str) and not value.isalnum():
            words.append(f"--{name}='{value}'")
        else:
            words.append(f"--{name}={value}")
    return " ".join(words)


def described(choice: Choice) -> dict[str, object]:
    """One choice for JSON: sizes in bytes, times in seconds."""
    counted = choice.counted
    return {
        "strategy": choice.strategy.name,
        "title": choice.strategy.title,
        "ranks": choice.world.size,
        "recompute": choice.candidate.recompute,
        "micro_batch": choice.candidate.micro_batch,
        "accumulation": choice.candidate.accumulation,
        "effective_batch": choice.effective_batch,
        "counted_by": counted.counted,
        "error": None if choice.error is None else asdict(choice.error),
        "notes": list(counted.notes),
        "fit": choice.fit.level,
        "bytes": {"least": choice.fit.least, "most": choice.fit.most, "device": choice.fit.memory},
        "resident": asdict(counted.resident),
        "phases": {name: {**asdict(phase.device), "host": phase.host} for name, phase in counted.phases.items()},
        "peak_phase": counted.peak_phase,
        "peak": counted.peak.total,
        "host_bytes_per_node": choice.fit.host,
        "save_bytes": counted.save_bytes,
        "sent_bytes_per_step": sum(each.bytes for each in counted.traffic),
        "seconds_per_step": {"least": choice.fastest.seconds, "most": choice.slowest.seconds},
        "seconds_by_part": dict(choice.slowest.parts),
        "limited_by": choice.slowest.bound,
        "samples_per_second": choice.samples_per_second,
        "options": choice.options,
        "flags": flags(choice.options),
    }


def document(
    device: DeviceModel,
    found: Mapping[int, Sequence[Choice]],
    notices: Sequence[str],
    own: Choice | None,
    calibration: Calibration | None = None,
) -> dict[str, object]:
    """Everything for JSON. `found` has the choices by the number of ranks, `own` is the one that is configured."""
    return {
        "schema": SCHEMA,
        "smalti": version("smalti"),
        "device": {"name": device.name, "title": device.title, "memory": device.memory},
        "allowances": [asdict(each) for each in allowances(device, max(found, default=1))],
        "configured": None if own is None else described(own) | {"configured": True},
        "ranks": {
            str(size): [described(each) | {"configured": each is own} for each in of_size] for size, of_size in found.items()
        },
        "measured": None if calibration is None else asdict(calibration),
        "notices": list(notices),
    }
