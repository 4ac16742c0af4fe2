"""Faults of accelerators. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GpuFault:
    """A fault of an accelerator. `kind` is a short machine-readable word ("cuda_error", "ecc", "lost", "thermal", "hang").

    `severity` is "warning" if the device still works. `memory`: its memory may be corrupt, so checkpoints are suspect.
    `reading` is what a monitor has read, in JSON's types: index, name, uuid, temperature_celsius, ecc_errors_single,
    ecc_errors_double, throttle_reasons, memory_used_percent, xid. It is empty for an error of the CUDA runtime.
    """

    kind: str
    message: str
    device: str
    rank: int
    severity: Literal["warning", "critical"] = "critical"
    memory: bool = False
    reading: Mapping[str, object] = field(default_factory=dict)


class FaultAction(IntEnum):
    """What to do about a fault of an accelerator. The largest action of all plugins is used, and of all ranks.

    A fault that was reported (`RunState.report_fault`) lets the running step end: all ranks stop at the same step boundary, and
    save together unless the action is STOP_UNSAVED.

    A fault that is an exception in a step skips that step in a single process, which changes no weights. Every action becomes
    STOP_UNSAVED if the fault happened while the weights were being changed, or if ten steps in a row were
    skipped. One of several ranks cannot continue alone, because the others wait for its gradients. It exits, and the run ends
    with exit code 5. A healthy rank that holds the complete state then saves it as of the last step boundary; after
    STOP_SUSPECT and STOP_UNSAVED it marks that checkpoint as suspect. If the ranks hold shards, the last checkpoint remains.
    """

    CONTINUE = 0
    """Continue with the next batch."""
    CHECKPOINT = 1
    """Save a checkpoint and continue. If the state cannot be read from the device, the run ends with exit code 5."""
    STOP_SAVED = 2
    """Save a checkpoint and stop with exit code 5."""
    STOP_SUSPECT = 3
    """Save a checkpoint that is marked as suspect, and stop with exit code 5."""
    STOP_UNSAVED = 4
    """Stop with exit code 5 without a checkpoint of this rank: its state cannot be trusted, or cannot be read any more."""
