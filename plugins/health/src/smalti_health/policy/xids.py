"""XID errors by the classes of NVIDIA's catalogue (https://docs.nvidia.com/deploy/xid-errors/)."""

from __future__ import annotations

from smalti_health.policy.decisions import Action, Decision

APPLICATION = frozenset({13, 31, 32, *range(39, 42), *range(68, 74), *range(75, 78), 94})
"""The program is at fault, or its memory error was contained: the CUDA call that fails ends the run, where there is one."""
IGNORED = frozenset({37, 38, 43, 44, 45, 63, 66, 67, 92, 121, 137, 141})
"""Not a fault by itself. 45 follows another XID; 63 is a row that was remapped."""
RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143})
"""The GPU has to be reset."""
RESTART = frozenset({79})
"""The GPU has fallen off the bus: the machine has to be restarted."""
ECC = frozenset({48})
"""Double-bit ECC error."""
NVLINK = frozenset({74})
NVLINK_SUBCODES = frozenset(range(144, 151))
"""Details of an error of NVLink. Whether a link is down is read from the link."""
MEMORY = frozenset({48, 64, 95, 140})
"""After these, memory of the GPU may be corrupt."""


def decision(xid: int) -> Decision | None:
    """What an XID means by itself; None for nothing."""
    if xid in IGNORED:
        return None
    memory = xid in MEMORY
    if xid in RESTART:
        action, meaning = Action.STOP_NOW, "the GPU has fallen off the bus; restart the machine"
    elif xid in RESET:
        action, meaning = Action.STOP_NOW, "the GPU has to be reset"
    elif xid in ECC:
        action, meaning = Action.STOP_SUSPECT, "an uncorrectable ECC error"
    elif xid in NVLINK:
        action, meaning = Action.STOP_SAVED, "an error of NVLink"
    elif xid in NVLINK_SUBCODES:
        action, meaning = Action.WARN, "an error of NVLink"
    elif xid in APPLICATION:
        action, meaning = Action.WARN, "an error of a program on this GPU, not of its hardware"
    else:
        action, meaning = Action.WARN, "it is in no class that is known; see NVIDIA's catalogue of XIDs"
    return Decision(kind="xid", detail=str(xid), action=action, message=f"XID {xid}: {meaning}", memory=memory)
