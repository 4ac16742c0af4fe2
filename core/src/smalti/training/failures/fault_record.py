"""What is written of a fault: one line of JSON on standard error and a `health` event of its node."""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import cast

from smalti.rundir import EventWriter, Ownership, RunDirectory
from smalti.types import FaultAction, GpuFault, RankInfo, RunState

PREFIX = "smalti: fault "
"""What the line begins with; JSON follows."""
_log = logging.getLogger(__name__)


def record_fault(info: RankInfo, state: RunState, fault: GpuFault, action: FaultAction) -> None:
    """Write a fault and the action that was decided on. On the rank with the fault; never raises."""
    found = info.config.masked(
        {
            "fault": fault.kind,
            "action": action.name.lower(),
            "severity": fault.severity,
            "memory": fault.memory,
            "message": fault.message,
            "device": fault.device,
            "uuid": str(fault.reading.get("uuid", "")),
            "rank": fault.rank,
            "node": info.world.node,
            "host": socket.gethostname(),
            "reading": dict(fault.reading),
        }
    )
    fields = cast(dict[str, object], found)
    line = {name: value for name, value in fields.items() if name != "reading"}
    print(f"{PREFIX}{json.dumps({**line, 'step': state.step, 'run': info.id})}", file=sys.stderr, flush=True)
    directory = RunDirectory(info.directory)
    if not Ownership(directory, info.id, info.started).confirm():
        return
    try:
        events = EventWriter(directory.node_events_file(info.world.node) if info.world.node else directory.events_file)
        events.append("health", step=state.step or None, **fields)
        events.close()
    except (OSError, TypeError) as error:  # a reading is not plain JSON, or the disk is full
        _log.warning("the event of the fault is lost: %s", error)
