"""What a diagnosis of this node has found. Importing this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingLevel = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `smalti doctor`. `check` is what was checked, in one or a few words; several findings may have the same.

    "error" means that training could not work, "warning" that it may fail or be slow, "note" what is good to know, "ok" that
    the check has found nothing wrong. A warning and an error have a `fix`. `node` is the node that it is about; empty for this
    one.
    """

    check: str
    level: FindingLevel
    message: str
    fix: str = ""
    node: str = ""
