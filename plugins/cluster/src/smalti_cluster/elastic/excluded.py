"""The nodes that left a group because an accelerator failed: `excluded.json` in the run directory.

Each node adds itself. It is not started again in this run until the file, or its entry, is removed.
Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from smalti import ExitCode, UserError
from smalti.system import load_json, read_regular, write_json_atomically
from smalti_health import CircuitFault

EXCLUDED = "excluded.json"
_log = logging.getLogger(__name__)


class FaultLoopError(UserError):
    """This node has left the group of the run because its accelerator failed."""

    exit_code = ExitCode.FAULT_LOOP


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A node that has left. `time` is in unix seconds, `device` is the UUID of the accelerator, "" if unknown."""

    machine_rank: int
    host: str
    rank: int
    device: str
    reason: str
    time: float


def read_excluded(directory: Path) -> list[Exclusion]:
    """The nodes that have left, in order; none if there is no file that can be read."""
    try:
        return [Exclusion(**each) for each in load_json(read_regular(directory / EXCLUDED))["nodes"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def exclude(directory: Path, machine_rank: int, fault: CircuitFault | None) -> None:
    """Add this node. The group continues without it even if that fails."""
    own = Exclusion(
        machine_rank=machine_rank,
        host=socket.gethostname(),
        rank=fault.rank if fault else -1,
        device=fault.uuid if fault else "",
        reason=f"{fault.kind}: {fault.message}" if fault else "an accelerator failed",
        time=time.time(),
    )
    try:
        write_json_atomically(directory / EXCLUDED, {"nodes": [asdict(each) for each in [*read_excluded(directory), own]]})
    except OSError as error:
        _log.warning("%s cannot be written: %s", directory / EXCLUDED, error)


def refuse_excluded(directory: Path, machine_rank: int) -> None:
    """Raise FaultLoopError if this node has left the group of this run."""
    for each in read_excluded(directory):
        if each.host == socket.gethostname() and each.machine_rank == machine_rank:
            raise FaultLoopError(
                f"node {machine_rank} ({each.host}) has left the group of this run, since an accelerator failed: {each.reason}",
                fix=f"start another node in its place; or after the repair remove {directory / EXCLUDED}",
            )
