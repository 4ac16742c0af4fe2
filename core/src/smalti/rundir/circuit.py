"""The faults of accelerators on one node of a run, over all its launches: `circuit.node-K.json`.

The circuit opens when a fault ends the run, and closes with the next step on that node. A run that faults again and again
without getting further is not started on the same host again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from smalti.system import atomic_write

FAULTS_IN_A_ROW = 3
"""The number of faults of one kind without progress after which the run is not started on that host again."""
_KEPT = 50


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

    def loop(self, host: str, uuids: frozenset[str] = frozenset()) -> CircuitFault | None:
        """The last of `FAULTS_IN_A_ROW` faults of the same kind without progress, on this host or one of these devices.

        Without progress: each of those launches began at the same step. None if the run may start here.
        """
        here = [fault for fault in self.faults if fault.host == host or fault.uuid in uuids]
        last = here[-FAULTS_IN_A_ROW:]
        alike = {(fault.kind, fault.resumed) for fault in last}
        return last[-1] if len(last) == FAULTS_IN_A_ROW and len(alike) == 1 else None


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


def open_circuit(directory: Path, node: int, fault: CircuitFault) -> None:
    """Add a fault that ends the run. Several ranks of a node may do so at once. Raises OSError."""
    with _changing(directory):
        circuit = read_circuit(directory, node)
        _write(directory, node, replace(circuit, state="open", faults=(*circuit.faults, fault)[-_KEPT:]))


def close_circuit(directory: Path, node: int) -> None:
    """The run makes steps on this node again; its faults are kept. Does nothing to a closed one. Raises OSError."""
    if read_circuit(directory, node).state == "open":
        with _changing(directory):
            _write(directory, node, replace(read_circuit(directory, node), state="closed"))


def reset_circuit(directory: Path, node: int) -> None:
    """Forget the faults, so that the run starts on this node again. Raises OSError."""
    with _changing(directory):
        _write(directory, node, Circuit(reset_at=time.time()))


def _write(directory: Path, node: int, circuit: Circuit) -> None:
    atomic_write(circuit_file(directory, node), json.dumps({"schema": 1, **asdict(circuit)}, indent=2).encode() + b"\n")


@contextmanager
def _changing(directory: Path) -> Iterator[None]:
    """A lock on the directory, where the file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
