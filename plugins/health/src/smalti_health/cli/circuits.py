"""The circuits of a run directory, in JSON's types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smalti import UserError
from smalti.rundir import read_circuits, reset_circuit


def circuits(directory: Path) -> list[dict[str, Any]]:
    """A circuit for each node that had a fault, each with its faults, the oldest first."""
    return [{"node": node, **asdict(circuit)} for node, circuit in read_circuits(directory).items()]


def reset_all(directory: Path, nodes: Iterable[int]) -> None:
    """Raises UserError if the run directory cannot be written."""
    for node in nodes:
        try:
            reset_circuit(directory, node)
        except OSError as error:
            raise UserError(
                f"the circuit of node {node} cannot be reset: {error}", fix="run it as the owner of the run"
            ) from error
