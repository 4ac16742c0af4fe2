"""What a node does after a generation has ended with an exit code. Importing this module imports no torch."""

from __future__ import annotations

import socket
from pathlib import Path

from smalti import ExitCode
from smalti_cluster.elastic.messages import Decision, grows
from smalti_health import CircuitFault, read_circuits

_AGAIN = (ExitCode.KILLED, ExitCode.GPU_FAULT)
"""After all other codes a new start would end in the same way, or nobody wants one."""


def decide(code: ExitCode, message: str = "", *, faulty: bool, alone: bool) -> Decision:
    """What this node does. `faulty`: one of its accelerators has failed. `alone`: the run has no other node.

    Lost ranks and nodes start the group again. A node with a failed accelerator leaves the group to the others.
    `message` is that of the end: a group that was stopped in order to grow starts again.
    """
    if grows(code, message):
        return "again"
    if code not in _AGAIN or (code is ExitCode.GPU_FAULT and alone):
        return "end"
    return "leave" if faulty else "again"


def fault_of_node(directory: Path, ranks: range, since: float) -> CircuitFault | None:
    """The fault of an accelerator that one of these ranks of this host has recorded since a time (in unix seconds)."""
    found = [fault for circuit in read_circuits(directory).values() for fault in circuit.faults]
    own = [fault for fault in found if fault.rank in ranks and fault.host == socket.gethostname() and fault.time >= since]
    return own[-1] if own else None
