"""What a diagnosis returns: facts about the node and findings, as a table or as JSON."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

from smalti import ExitCode, Finding

SCHEMA = 1
"""Of the JSON. Keys are added within a schema; none is removed and none changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The result of one check: facts in JSON's types, and what it has found. `name` is the key of the facts in the JSON."""

    name: str
    facts: Mapping[str, object] = field(default_factory=dict)
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was found on this node."""

    sections: tuple[Section, ...]
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections for finding in section.findings)

    @property
    def exit_code(self) -> ExitCode:
        """PREFLIGHT if training could not work."""
        return ExitCode.PREFLIGHT if any(each.level == "error" for each in self.findings) else ExitCode.DONE

    def as_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "smalti": version("smalti"),
            "host": self.host,
            "time": round(self.time, 3),
            "facts": {section.name: dict(section.facts) for section in self.sections if section.facts},
            "findings": [asdict(each) for each in self.findings],
            "exit_code": int(self.exit_code),
        }
