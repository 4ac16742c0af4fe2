"""The circuit of a run: open after a fault of a GPU has ended it, until the next step on that node.

A run that faults again and again without getting further is not started on the same host again.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from smalti import Config, ExitCode, GpuFault, Problem, RankInfo, RunState, UserError
from smalti.config import LaunchOptions, RunOptions
from smalti.rundir import Ownership, RunDirectory
from smalti.system import atomic_write
from smalti_health.circuit_file import Circuit, CircuitFault, circuit_file, read_circuit, read_circuits

FAULTS_IN_A_ROW = 3
"""The number of faults of one kind without progress after which the run is not started on that host again."""
_KEPT = 50


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


def repeated_fault(circuit: Circuit, host: str, uuids: frozenset[str] = frozenset()) -> CircuitFault | None:
    """The last of `FAULTS_IN_A_ROW` faults of the same kind without progress, on this host or one of these devices.

    Without progress: each of those launches began at the same step. None if the run may start here.
    """
    here = [fault for fault in circuit.faults if fault.host == host or fault.uuid in uuids]
    last = here[-FAULTS_IN_A_ROW:]
    alike = {(fault.kind, fault.resumed) for fault in last}
    return last[-1] if len(last) == FAULTS_IN_A_ROW and len(alike) == 1 else None


def record(info: RankInfo, state: RunState, fault: GpuFault) -> None:
    """Open the circuit of this node after a fault that ends the run, if the run directory is still that of this launch."""
    if not Ownership(RunDirectory(info.directory), info.id, info.started).confirm():
        return
    known = CircuitFault(
        kind=fault.kind,
        time=time.time(),
        step=state.step,
        host=socket.gethostname(),
        rank=fault.rank,
        resumed=state.resumed,
        uuid=str(info.config.masked(str(fault.reading.get("uuid", "")))),
        message=str(info.config.masked(fault.message)),
    )
    open_circuit(info.directory, info.world.node, known)


def loop_problems(config: Config) -> Iterator[Problem]:
    """A problem if the run has ended with the same fault on this host again and again, without getting further."""
    directory, node = config[RunOptions].output_dir, config[LaunchOptions].machine_rank
    host = socket.gethostname()
    fault = None if directory is None else repeated_fault(read_circuit(directory, node), host)
    if directory is None or fault is None:
        return
    where = "before its first step" if fault.resumed is None else f"from step {fault.resumed}"
    yield Problem(
        message=f"the last {FAULTS_IN_A_ROW} starts {where} on {host} have ended with the same fault of an accelerator: "
        f"{fault.kind} on rank {fault.rank}{f' ({fault.uuid})' if fault.uuid else ''}: {fault.message}",
        fix=f"start on another node; or after the repair `smalti health reset {directory}` of smalti-health, "
        f"or remove {circuit_file(directory, node)}",
        exit_code=ExitCode.FAULT_LOOP,
    )


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
