"""D9: faults of accelerators on one of four ranks on two nodes, with a webhook from the node that has the fault."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

from smalti.checkpoint import SUSPECT, CheckpointStore, verify
from smalti_health.circuit_file import read_circuit
from smalti_health.circuits import reset_circuit
from smalti_testing.http_receiver import Receiver
from support.nodes import Cluster, forbidden
from support.nodes.runs import Run

from ..accelerator_faults import LIMIT_SECONDS, distribution, install
from ..subject import Report

RANKS = 4
TIMES: list[float] = []
"""Seconds from each fault to the stop of the last rank, over all rounds of this process."""
EXIT_TIMES: list[float] = []
"""The same to the exit of the last `smalti train`."""


def faults_on_nodes(chance: Random, place: Path, *, faults: int = 10) -> Report:
    """D9: one after the other, in runs that resume: all ranks stop at one step, all nodes end with exit code 5."""
    report = Report()
    if reason := forbidden():
        print(f"      D9: not possible here: {reason}", flush=True)
        return report
    plugin = install(place)
    with Cluster(2, warm=True) as cluster, Receiver() as receiver:
        address = cluster.relay(receiver.port)
        for number in range(faults):
            directory = place / f"run-{chance.randrange(3)}"
            _fault(report, chance, cluster, receiver, address, directory, plugin, place / f"notes-{number}")
    print(
        f"      D9: seconds from fault to stop: {distribution(TIMES)}; to the last exit: {distribution(EXIT_TIMES)}", flush=True
    )
    return report


def one_fault_on_nodes(chance: Random, place: Path) -> Report:
    """D9 in short."""
    return faults_on_nodes(chance, place, faults=1)


def _fault(
    report: Report,
    chance: Random,
    cluster: Cluster,
    receiver: Receiver,
    address: str,
    directory: Path,
    plugin: Path,
    notes: Path,
) -> None:
    action, rank = chance.choice(("STOP_SAVED", "STOP_SUSPECT", "STOP_UNSAVED")), chance.randrange(RANKS)
    store = CheckpointStore(directory / "checkpoints")
    last = max((entry.step for entry in store.all()), default=0)
    case = {
        "rank": rank,
        "step": last + chance.randint(1, 12),
        "delay": chance.uniform(0, 0.2),
        "kind": "ecc",
        "action": action,
    }
    webhook = {"webhook_type": "raw", "callback_url": f"http://{address}/hook", "allow_private": True}
    before = len(receiver.requests)
    for node in (0, 1) if directory.exists() else ():
        reset_circuit(directory, node)  # otherwise three faults without progress are refused
    run = Run(
        cluster,
        directory,
        env={
            "PYTHONPATH": str(plugin),
            "FAULT_CASE": json.dumps(case),
            "FAULT_NOTES": str(notes),
            "SMALTI_WEBHOOK_CONFIG": json.dumps(webhook),
        },
    )
    told = f"{action} on rank {rank} after step {case['step']}"
    codes = run.codes()
    ended_at = time.time()
    report.faults += 1
    report.expect(codes == [5, 5], f"{told}: exit codes {codes}: {[each[-600:] for each in run.outputs()]}")
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    ended = {line["rank"]: line for line in lines if line["what"] == "ended"}
    began = [line["time"] for line in lines if line["what"] == "reported"]
    report.expect(len(began) == 1 and len(ended) == RANKS, f"{told}: {len(began)} faults, {len(ended)} ranks have ended")
    if began and ended:
        seconds = max(line["time"] for line in ended.values()) - began[0]
        TIMES.append(seconds)
        EXIT_TIMES.append(ended_at - began[0])
        report.expect(seconds < LIMIT_SECONDS, f"{told}: {seconds:.1f} s to the stop")
        steps = {line["step"] for line in ended.values()}
        report.expect(len(steps) == 1, f"{told}: ranks stop at different steps: {ended}")
        entry = store.all()[-1]
        report.expect(verify(entry.path).ok and entry.step in steps, f"{told}: step {entry.step} of {steps} is saved")
        flags = entry.manifest.flags if entry.manifest is not None else ()
        report.expect((SUSPECT in flags) == (action != "STOP_SAVED"), f"{told}: the flags are {flags}")
    node = rank // 2
    states = [read_circuit(directory, each).state for each in (0, 1)]
    report.expect(states[node] == "open", f"{told}: circuits {states}")
    sent = [each.json for each in receiver.requests[before:]]
    faults = [each for each in sent if each["type"] == "gpu.fault"]
    report.expect(len(faults) == 1, f"{told}: {len(faults)} webhooks of the fault")
    for each in faults:
        source = each["source"]
        report.expect((source["rank"], source.get("host")) == (rank, f"node{node}"), f"{told}: sent by {source}")
    report.expect(not (left := cluster.leftovers()), f"{told}: processes are left: {left}")
