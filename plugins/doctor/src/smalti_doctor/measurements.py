"""Measurements of the devices of a node, compared with each other, with those of an earlier time and with what is published."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from smalti import Finding
from smalti.parallel import device_model_of
from smalti.plugins import CacheFile
from smalti_doctor.child import ChildResult, run_in_child
from smalti_doctor.measure import SECONDS, DiskMeasurement, Measurement, measure_disk
from smalti_doctor.report import Section

SLOWER = 0.10
"""A device that is slower than the others by more than this share is a warning. Processors, which other programs use: 0.25."""
_SLOWER_PROCESSOR = 0.25
_START_SECONDS = 120.0
_CHECK = "speed"


def speed_cache() -> CacheFile:
    """The measurements by device, in the user's cache folder."""
    return CacheFile("speed")


def measure_node(count: int, folder: Path, seconds: float = SECONDS, cache: CacheFile | None = None) -> Section:
    """Measure all `count` devices at the same time, each in a child process, then the disk. 0 devices: the CPU.

    The results are kept in `cache`, by default a file in the user's cache folder, and compared with those that are there. One
    that is slower does not replace the earlier one, so that it is reported until the device is as fast again.
    """
    kept = cache or speed_cache()
    with ThreadPoolExecutor(max(1, count)) as pool:
        children = list(pool.map(lambda index: _measured(index, seconds), range(max(1, count))))
    parsed = [_parse(child.values) for child in children if child.state == "done"]
    found = [each for each in parsed if each is not None]
    findings = [
        Finding(
            check=_CHECK, level="error", message=f"device {index} cannot be measured: {child.error}", fix="check its driver"
        )
        for index, child in enumerate(children)
        if child.state != "done"
    ]
    findings += [Finding(check=_CHECK, level="ok", message=describe(each)) for each in found]
    labelled = {f"{each.kind}:{each.index}": each for each in found}
    findings += slower_devices(labelled)
    for label, each in labelled.items():
        earlier = kept.get(each.device)
        slower = list(slower_than_before(label, each, _parse(earlier))) if isinstance(earlier, dict) else []
        if not slower:
            kept.put(each.device, asdict(each))
        findings += slower
    facts: dict[str, object] = {"devices": [asdict(each) for each in found]}
    try:
        disk = measure_disk(folder, seconds)
    except OSError as error:
        message = f"the disk of {folder} cannot be measured: {error.strerror or error}"
        findings.append(Finding(check=_CHECK, level="warning", message=message, fix="choose another --output_dir"))
    else:
        facts["disk"] = asdict(disk)
        findings += _of_disk(disk, kept)
    return Section(name="speed", facts=facts, findings=findings)


def slower_devices(measured: Mapping[str, Measurement]) -> list[Finding]:
    """Those that are slower than the median of all devices with the same name, by what they are called in messages."""
    findings = []
    for model in dict.fromkeys(each.name for each in measured.values()):
        group = {label: _figures(each) for label, each in measured.items() if each.name == model}
        if len(group) < 2:
            continue
        for what in next(iter(group.values())):
            values = {label: figures[what] for label, figures in group.items() if what in figures}
            usual = median(values.values())
            for label, value in values.items():
                if value < (1 - _limit(measured[label])) * usual:
                    message = (
                        f"{label} ({model}) is {100 * (1 - value / usual):.0f} % slower than the median of {len(values)}: "
                        f"{what} {_shown(what, value)}, median {_shown(what, usual)}"
                    )
                    findings.append(Finding(check=_CHECK, level="warning", message=message, fix=_fix(measured[label])))
    return findings


def slower_than_before(label: str, now: Measurement, before: Measurement | None) -> Iterator[Finding]:
    """Warnings for what has become slower since an earlier measurement of the same device."""
    earlier = _figures(before) if before is not None else {}
    for what, value in _figures(now).items():
        if what in earlier and value < (1 - _limit(now)) * earlier[what]:
            assert before is not None
            date = time.strftime("%Y-%m-%d", time.localtime(before.time))
            message = (
                f"{label} ({now.name}) is {100 * (1 - value / earlier[what]):.0f} % slower than on {date}: "
                f"{what} {_shown(what, value)}, then {_shown(what, earlier[what])}"
            )
            yield Finding(check=_CHECK, level="warning", message=message, fix=_fix(now))


def describe(measured: Measurement) -> str:
    """All figures in one line, with the share of the published peak where that is known."""
    model = device_model_of(measured.name)
    parts = []
    for what, value in _figures(measured).items():
        peak = model.peaks.get(what.split()[0]) if model is not None and what.endswith("products") else None
        parts.append(f"{what} {_shown(what, value)}{f' ({100 * value / peak:.0f} % of the peak)' if peak else ''}")
    return f"{measured.kind}:{measured.index} {measured.name}: {', '.join(parts)}"


def _measured(index: int, seconds: float) -> ChildResult:
    return run_in_child("smalti_doctor.measure", (str(index), str(seconds)), seconds=_START_SECONDS + 3 * seconds)


def _parse(values: Mapping[str, Any]) -> Measurement | None:
    """None for what another version has written."""
    try:
        return Measurement(**values)
    except TypeError:
        return None


def _figures(measured: Measurement) -> dict[str, float]:
    figures = {f"{precision} products": value for precision, value in measured.products.items()}
    figures["memory"] = measured.memory
    if measured.to_device is not None:
        figures["copies to the device"] = measured.to_device
    if measured.from_device is not None:
        figures["copies from the device"] = measured.from_device
    return figures


def _shown(what: str, value: float) -> str:
    unit, scale = ("GB/s", 1e9)
    if what.endswith("products"):
        unit, scale = ("TFLOP/s", 1e12) if value >= 1e12 else ("GFLOP/s", 1e9)
    return f"{value / scale:.3g} {unit}"


def _limit(measured: Measurement) -> float:
    return _SLOWER_PROCESSOR if measured.kind == "cpu" else SLOWER


def _fix(measured: Measurement) -> str:
    if measured.kind == "cpu":
        return "measure again without other programs; check the clock and the power profile of the processor"
    return (
        "measure again without other programs; `nvidia-smi -q -d PERFORMANCE,CLOCK,PCIE` says what slows it: heat, power, PCIe"
    )


def _of_disk(disk: DiskMeasurement, kept: CacheFile) -> Sequence[Finding]:
    message = f"disk of {disk.folder}: write with fsync {_shown('disk', disk.write)}, read {_shown('disk', disk.read)}"
    findings = [Finding(check=_CHECK, level="ok", message=message)]
    earlier = kept.get(f"disk {disk.folder}")
    if isinstance(earlier, dict) and isinstance(then := earlier.get("write"), float) and disk.write < then / 2:
        message = f"writing to {disk.folder} takes {then / disk.write:.1f} times as long as when it was last measured"
        fix = "check the disk and who else uses it; checkpoints take longer"
        return [*findings, Finding(check=_CHECK, level="warning", message=message, fix=fix)]
    kept.put(f"disk {disk.folder}", asdict(disk))
    return findings
