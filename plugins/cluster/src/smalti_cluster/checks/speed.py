"""The devices of a node: what they are and how fast. Child processes use them, because drivers hang."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from smalti_cluster.checks.channel import Message
from smalti_cluster.checks.comparison import Comparison
from smalti_cluster.checks.report import NodesReport
from smalti_doctor.child import ChildResult, run_in_child
from smalti_doctor.measure import Measurement
from smalti_doctor.measurements import slower_devices, slower_than_before

_START_SECONDS = 120.0
START_SECONDS = 2 * _START_SECONDS
"""What a measurement may take longer than asked for, on a node that is busy."""


def device_facts(*, use_cpu: bool) -> Message:
    """What torch sees, from a child process: "kind", "count", "name" and "text", with a "problem" if it cannot be used."""
    cpu: Message = {"kind": "cpu", "count": 0, "name": "", "text": "CPU"}
    if use_cpu:
        return cpu
    child = run_in_child("smalti_doctor.torch_facts", seconds=_START_SECONDS)
    if child.state != "done" or "devices" not in child.values:
        reason = child.error or child.values.get("broken") or "torch is not installed"
        return {**cpu, "kind": "", "text": "?", "problem": f"torch cannot use them: {reason}"}
    devices = cast(list[Mapping[str, Any]], child.values["devices"])
    if not devices:
        return cpu
    names = {str(each["name"]) for each in devices}
    errors = [f"device {each['index']}: {each['error']}" for each in devices if "error" in each]
    name = ", ".join(sorted(names))
    found: Message = {"kind": child.values["kind"], "count": len(devices), "name": name, "text": f"{len(devices)} x {name}"}
    return {**found, "problem": "; ".join(errors)} if errors else found


def measure_devices(count: int, seconds: float) -> Message:
    """Measure all devices at the same time, each in a child process; the CPU if there are none."""
    indexes = range(max(1, count))
    with ThreadPoolExecutor(len(indexes)) as pool:
        children = list(pool.map(lambda index: _measured(index, seconds), indexes))
    return {
        "devices": [dict(child.values) for child in children if child.state == "done"],
        "problems": [f"device {index}: {child.error}" for index, child in enumerate(children) if child.state != "done"],
    }


def compare_speed(
    comparison: Comparison, answers: Mapping[int, Message], last: NodesReport | None
) -> dict[str, list[Mapping[str, object]]]:
    """Add what is slower than the other devices of all nodes, or than in the last report. Returns the measurements by node."""
    labelled: dict[str, Measurement] = {}
    found: dict[str, list[Mapping[str, object]]] = {}
    earlier = [_parse(each) for some in (last.measured.devices if last else {}).values() for each in some]
    before = {each.device: each for each in earlier if each is not None}
    for rank, answer in answers.items():
        found[str(rank)] = cast(list[Mapping[str, object]], answer.get("devices") or [])
        for problem in cast(list[str], answer.get("problems") or []):
            fix = "check its driver; `smalti doctor` on that node says more"
            comparison.add("speed", "error", f"{comparison.names[rank]}: {problem} cannot be measured", fix, node=rank)
        for each in filter(None, map(_parse, found[str(rank)])):
            label = f"{each.kind}:{each.index} of {comparison.names[rank]}"
            labelled[label] = each
            comparison.findings += slower_than_before(label, each, before.get(each.device))
    comparison.findings += slower_devices(labelled)
    return found


def _measured(index: int, seconds: float) -> ChildResult:
    return run_in_child("smalti_doctor.measure", (str(index), str(seconds)), seconds=_START_SECONDS + 3 * seconds)


def _parse(values: Mapping[str, Any]) -> Measurement | None:
    try:
        return Measurement(**values)
    except TypeError:
        return None
