"""The faults of accelerators on one node of a run, over all its launches: `circuit.node-K.json`.

`smalti_health.circuits` writes them: the circuit opens when a fault ends the run, and closes with the next step on that node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, kw_only=True)
class CircuitFault:
    """A fault that ended the run. `time` is in unix seconds.

    `resumed` is the step at which that launch began, None if it did not get there. `uuid` is that of the device, "" if unknown.
    """

    kind: str
    time: float
    step: int
    host: str
    rank: int
    resumed: int | None = None
    uuid: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """The faults on a node, the oldest first. `reset_at` is when somebody last reset it, in unix seconds."""

    state: Literal["open", "closed"] = "closed"
    faults: tuple[CircuitFault, ...] = ()
    reset_at: float | None = field(default=None)


_ADAPTER = TypeAdapter(Circuit)


def circuit_file(directory: Path, node: int) -> Path:
    """The file of node `node` in a run directory."""
    return directory / f"circuit.node-{node}.json"


def read_circuit(directory: Path, node: int) -> Circuit:
    """The circuit of a node; a closed one without faults if there is no file, or none that can be read."""
    try:
        return _ADAPTER.validate_json(circuit_file(directory, node).read_bytes())
    except (OSError, ValidationError):
        return Circuit()


def read_circuits(directory: Path) -> Mapping[int, Circuit]:
    """The circuits of a run, by node."""
    nodes = [path.name.removeprefix("circuit.node-").removesuffix(".json") for path in directory.glob("circuit.node-*.json")]
    return {node: read_circuit(directory, node) for node in sorted(int(each) for each in nodes if each.isdecimal())}
