"""A trace, or those of a run directory, under other thresholds."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smalti import UserError
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import decide
from smalti_health.policy.trace import read_trace


def replayed(path: Path, limits: Limits) -> tuple[list[dict[str, Any]], int]:
    """The decisions, in JSON's types, and the number of readings. Raises UserError if there is no trace."""
    decisions, count = [], 0
    for files in _nodes(path):
        trace = read_trace(files)
        count += len(trace.readings)
        for each in decide(trace.devices, trace.readings, limits):
            decisions.append(
                {
                    "time": datetime.fromtimestamp(each.time, UTC).isoformat(timespec="seconds"),
                    "gpu": trace.devices[each.uuid].index,
                    "uuid": each.uuid,
                    "decision": each.action.name.lower(),
                    "kind": each.kind,
                    "message": each.message,
                }
            )
    return decisions, count


def _nodes(path: Path) -> list[list[Path]]:
    """The files of each node, the older one first."""
    if path.is_file():
        return [[path]]
    newest = [each for each in sorted(path.glob("health.node-*.jsonl")) if not each.name.endswith(".1.jsonl")]
    if not newest:
        raise UserError(f"{path} has no trace of GPU readings", fix="it is written by runs on GPUs, as health.node-K.jsonl")
    older = [each.with_name(each.name.removesuffix(".jsonl") + ".1.jsonl") for each in newest]
    return [[each for each in pair if each.exists()] for pair in zip(older, newest, strict=True)]
