"""XID errors by the classes of NVIDIA's catalogue (https://docs.nvidia.com/deploy/xid-errors/)."""

from __future__ import annotations

from smalti_health.policy.decisions import Action, Decision

KNOWN = "November 2026, XIDs 1 to 172"
"""When the classes were compared with the catalogue, and how far that went: its table for A100 and later GPUs."""
APPLICATION = frozenset(
    {8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 74), *range(75, 78), 80, *range(82, 87), 88, 89, 94}
    | {*range(96, 106), *range(126, 136), 139}
)
"""The program is at fault, or its memory error was contained: the CUDA call that fails ends the run, where there is one."""
IGNORED = frozenset({14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, *range(106, 109), 121, 137, 141, 152, 153, 154, 157, 160, 161})
"""Not a fault by itself. 45 follows another XID; 63 is a row that was remapped. 154 says that the recovery action
has changed, which is read from the GPU.
"""
RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
"""The GPU has to be reset."""
RESTART = frozenset({79})
"""The GPU has fallen off the bus: the machine has to be restarted."""
RESTART_VIRTUAL = frozenset({151})
"""The virtual machine has to be restarted."""
ECC = frozenset({48, 171, 172})
"""Double-bit ECC error. 171 and 172 tell whether it is one of DRAM or of SRAM."""
NVLINK = frozenset({74})
NVLINK_SUBCODES = frozenset(range(144, 151))
"""Details of an error of NVLink. Whether a link is down is read from the link."""
NO_ACTION = frozenset({54, 78, 142, 159, *range(162, 171)})
"""The catalogue describes them and names no action that a run could take."""
MEMORY = frozenset({48, 64, 95, 140, 171, 172})
"""After these, memory of the GPU may be corrupt."""


def decision(xid: int) -> Decision | None:
    """What an XID means by itself; None for nothing."""
    if xid in IGNORED:
        return None
    memory = xid in MEMORY
    if xid in RESTART:
        action, meaning = Action.STOP_NOW, "the GPU has fallen off the bus; restart the machine"
    elif xid in RESTART_VIRTUAL:
        action, meaning = Action.STOP_NOW, "its keys could not be changed; restart the virtual machine"
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
    elif xid in NO_ACTION:
        action, meaning = Action.WARN, "NVIDIA's catalogue of XIDs describes it and names no action"
    else:
        action, meaning = Action.WARN, f"it is in no class that is known ({KNOWN}); see NVIDIA's catalogue of XIDs"
    return Decision(kind="xid", detail=str(xid), action=action, message=f"XID {xid}: {meaning}", memory=memory)
