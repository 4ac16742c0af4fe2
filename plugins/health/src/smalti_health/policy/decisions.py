"""What the policy decides about a reading."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Action(IntEnum):
    """From the least to the most. IGNORE is never a decision of its own: nothing is decided then."""

    IGNORE = 0
    WARN = 1
    """Report it and continue."""
    STOP_SAVED = 2
    """Save a checkpoint and stop: the GPU still computes correctly."""
    STOP_SUSPECT = 3
    """Save a checkpoint that is marked as suspect, and stop: memory of the GPU may be corrupt."""
    STOP_NOW = 4
    """Stop without a checkpoint of this rank: its GPU cannot be read any more."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`kind` is a short machine-readable word, `detail` distinguishes decisions of one kind, as the number of an XID does."""

    kind: str
    action: Action
    message: str
    detail: str = ""
    memory: bool = False
    uuid: str = ""
    time: float = 0.0
