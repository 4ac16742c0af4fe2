"""The result of checking nodes against each other: findings, and a table of what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

from smalti import Finding

_ORDER = {"error": 0, "warning": 1, "note": 2, "ok": 3}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check: what most nodes have, and what the others have, by number of node."""

    check: str
    usual: str
    differing: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures that a later check is compared with. Seconds, bytes per second; by number of node, or "0-1" for a pair.

    `visible_seconds` is how long a rename and the listing have taken, at most, to be seen on other nodes. `clocks` are the
    offsets from the clock of node 0. `devices` are the `Measurement`s of each node.
    """

    visible_seconds: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    devices: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodesReport:
    """`nodes` are the host names by number."""

    nodes: Mapping[int, str]
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    measured: Measured = field(default_factory=Measured)

    def of_level(self, *levels: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.level in levels]

    @property
    def works(self) -> bool:
        """Whether training could work."""
        return not self.of_level("error")

    def as_json(self) -> dict[str, object]:
        return {
            "works": self.works,
            "nodes": {str(rank): host for rank, host in self.nodes.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [
                {"check": row.check, "usual": row.usual, "differing": {str(n): text for n, text in row.differing.items()}}
                for row in self.rows
            ],
            "measured": asdict(self.measured),
        }

    @classmethod
    def of_json(cls, values: Mapping[str, object]) -> NodesReport:
        """Raises ValueError, TypeError or KeyError for something else."""
        nodes, measured = cast(Mapping[str, str], values["nodes"]), cast(Mapping[str, object], values["measured"])
        return cls(
            nodes={int(rank): str(host) for rank, host in nodes.items()},
            findings=tuple(Finding(**each) for each in cast(Sequence[Mapping[str, str]], values["findings"])),  # type: ignore[arg-type]
            rows=tuple(
                Row(
                    check=str(each["check"]),
                    usual=str(each["usual"]),
                    differing={int(rank): text for rank, text in cast(Mapping[str, str], each["differing"]).items()},
                )
                for each in cast(Sequence[Mapping[str, object]], values["checks"])
            ),
            measured=Measured(**measured),  # type: ignore[arg-type]
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and rows. There is a column for each node that differs in something, after that of most nodes."""
        columns = sorted({rank for row in self.rows for rank in row.differing})
        most = "all nodes" if not columns else "most nodes"
        titles = ["check", most, *(f"node {rank} ({self.nodes.get(rank, '?')})" for rank in columns)]
        return titles, [[row.check, row.usual, *(row.differing.get(rank, "") for rank in columns)] for row in self.rows]

    def lines(self) -> list[str]:
        """The findings that matter, errors first, each with its fix."""
        shown = sorted(self.of_level("error", "warning", "note"), key=lambda finding: _ORDER[finding.level])
        return [f"{each.level}: {each.message}{f'{chr(10)}    fix: {each.fix}' if each.fix else ''}" for each in shown]
