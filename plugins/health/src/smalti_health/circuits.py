"""The circuit of a run: open after a fault of a GPU has ended it, until the next step on that node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smalti import UserError
from smalti.rundir import Circuit, CircuitFault, read_circuits, reset_circuit


@dataclass(frozen=True, kw_only=True)
class CircuitState:
    """The circuits of a run, by the number of each node that had a fault. A node that is not in it had none."""

    nodes: Mapping[int, Circuit]

    @property
    def state(self) -> Literal["open", "closed"]:
        """Open if the circuit of any node is."""
        return "open" if any(circuit.state == "open" for circuit in self.nodes.values()) else "closed"

    @property
    def faults(self) -> tuple[CircuitFault, ...]:
        """Those of all nodes, the oldest first; also those before the last step, after which a circuit is closed again."""
        return tuple(sorted((each for circuit in self.nodes.values() for each in circuit.faults), key=lambda each: each.time))


def circuit_state(run_directory: Path | str) -> CircuitState:
    """The circuits of a run, as its launches on all nodes have left them. Raises UserError if there is no such directory.

    Reads the small files `circuit.node-K.json`, and no GPU: it may be called from any host, also while the run trains.
    """
    directory = Path(run_directory).expanduser()
    if not directory.is_dir():
        raise UserError(f"there is no run directory {directory}", fix="give the --output_dir of a run")
    return CircuitState(nodes=read_circuits(directory))


def reset_circuits(directory: Path) -> list[int]:
    """Forget the faults of all nodes, and return the nodes. Raises UserError if the run directory cannot be written."""
    nodes = list(circuit_state(directory).nodes)
    for node in nodes:
        try:
            reset_circuit(directory, node)
        except OSError as error:
            raise UserError(
                f"the circuit of node {node} cannot be reset: {error}", fix="run it as the owner of the run"
            ) from error
    return nodes
