"""F: groups of three nodes that lose one at a random step, by a kill, a cut, a fault or a killed rank, and continue.

Or it is lost just before they are formed again ("absent"), or they are stopped while they save in order to grow ("stop").

The end is bit by bit that of a run that was stopped at the step of the loss and continued on the nodes that remained, and
within rounding that of a run that lost nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from smalti.checkpoint import CheckpointStore
from smalti.rundir import RunDirectory
from support.nodes import Cluster, forbidden
from support.nodes.runs import Run

from ..subject import Report
from .scenarios import only

NODES, LAST = 3, 120
PROBE = Path(__file__).parents[2] / "e2e" / "probe"
BATCH: dict[str, object] = {"train_batch_size": 1, "gradient_accumulation_steps": 2, "max_train_steps": LAST}  # 6 samples
ROUNDING = 1e-3
KINDS = ("kill", "cut", "fault", "rank", "absent", "back", "stop")


def _group(cluster: Cluster, directory: Path, **options: object) -> Run:
    own = {node: {"nodes": f"2:{NODES}"} for node in range(NODES)}
    return Run(cluster, directory, nodes=tuple(range(NODES)), ranks=1, own=own, **{**BATCH, **options})  # type: ignore[arg-type]


def _tensors(directory: Path, step: int) -> dict[str, torch.Tensor]:
    folder = RunDirectory(directory).checkpoints / f"step-{step:08d}"
    paths = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder).parent} {name}": value for path in paths for name, value in load_file(path).items()}


def _compare(report: Report, cluster: Cluster, place: Path, remaining: tuple[int, ...], step: int) -> None:
    """With a run of all nodes that stops at the step, continued on two; and with one that is not stopped."""
    found = _tensors(place / "run", LAST)
    orderly, whole = place / "orderly", place / "whole"
    for directory, steps in ((orderly, step), (whole, LAST)):
        first = _group(cluster, directory, max_train_steps=steps)
        report.expect(first.codes() == [0] * NODES, f"the undisturbed run: {first.outputs()}")
    options = {**BATCH, "gradient_accumulation_steps": 3}
    second = Run(cluster, orderly, nodes=remaining, ranks=1, **options)  # type: ignore[arg-type]
    report.expect(second.codes() == [0, 0], f"the continued run: {second.outputs()}")
    expected, undisturbed = _tensors(orderly, LAST), _tensors(whole, LAST)
    other = [name for name, value in expected.items() if name not in found or not torch.equal(value, found[name])]
    report.expect(not other and expected.keys() == found.keys(), f"not bit-equal to the orderly stop at {step}: {other[:5]}")
    norms = [(name, value.double().norm(), undisturbed[name].double().norm()) for name, value in found.items()]
    far = [name for name, mine, theirs in norms if abs(mine - theirs) > ROUNDING * (theirs + ROUNDING)]
    report.expect(not far, f"not within rounding of the undisturbed run: {far[:5]}")


def _wait_for_generation(run: Run, number: int, seconds: float = 240) -> int:
    """Until a generation of that number has begun; the step from which it continues. Raises TimeoutError with the outputs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [each for each in RunDirectory(run.directory).events() if each.kind == "generation"]
        if len(found) >= number:
            return found[number - 1].step or 0
        time.sleep(0.1)
    raise TimeoutError(f"generation {number} never came: {run.outputs()}")


def _returning(cluster: Cluster, place: Path, victim: int, step: int) -> tuple[Run, int]:
    """A run of which a node is lost and comes back as a spare, and the step at which it was lost."""
    run = _group(cluster, place / "run", max_train_steps=100_000, grow_after=10)
    run.wait_for_step(step)
    cluster.kill(victim)
    lost = _wait_for_generation(run, 2)
    run.start_again(victim)
    return run, lost


def stopped_growth(cluster: Cluster, place: Path, victim: int, step: int) -> Report:
    """Somebody asks for a stop at the moment at which the group saves in order to take a node back: all nodes stop."""
    report = Report(faults=1)
    run, _ = _returning(cluster, place, victim, step)
    directory = RunDirectory(run.directory)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and len(list(directory.checkpoints.glob("*step-*"))) < 2:  # one that is being saved too
        time.sleep(0.001)
    directory.request("stop")
    codes = run.codes(120)
    report.expect(codes == [7] * NODES, f"exit codes {codes}: {run.outputs()}")
    answers = [each.fields["accepted"] for each in directory.events() if each.kind == "control_ack"]
    report.expect(answers == [True], f"answers {answers}")
    steps = [each.step for each in directory.events() if each.kind == "step"]
    report.expect(len(steps) == len(set(steps)), "steps are made twice")
    saved = [entry.step for entry in CheckpointStore(directory.checkpoints).all()]
    report.expect(saved[-1] == steps[-1], f"checkpoints {saved}, and the last step is {steps[-1]}")
    return report


def returned_node(cluster: Cluster, place: Path, victim: int, step: int) -> Report:
    """A node is lost, comes back as a spare and is taken back: bit by bit as three orderly runs on 3, 2 and 3 nodes."""
    report = Report(faults=1)
    others = [node for node in range(NODES) if node != victim]
    run, lost = _returning(cluster, place, victim, step)
    back = _wait_for_generation(run, 3)
    run.wait_for_step(back + 5)
    run.processes[others[0]].send_signal(signal.SIGTERM)
    codes = run.codes(120)
    report.expect(codes == [6] * NODES, f"exit codes {codes}: {run.outputs()}")
    saved = [entry.step for entry in CheckpointStore(run.directory / "checkpoints").all()]
    report.expect(saved[:2] == [lost, back] and len(saved) == 3, f"checkpoints {saved}, not {lost}, {back} and the last one")
    steps = [each.step for each in RunDirectory(run.directory).events() if each.kind == "step"]
    report.expect(len(steps) == len(set(steps)), "steps are made twice")
    cluster.reset()
    orderly, fewer = place / "orderly", {**BATCH, "gradient_accumulation_steps": 3}
    parts = [
        lambda last: _group(cluster, orderly, max_train_steps=last),
        lambda last: Run(cluster, orderly, nodes=others, ranks=1, **{**fewer, "max_train_steps": last}),  # type: ignore[arg-type]
        lambda last: _group(cluster, orderly, max_train_steps=last),
    ]
    for part, last in zip(parts, saved, strict=False):
        found = part(last)
        report.expect(set(found.codes()) == {0}, f"the orderly run to {last}: {found.outputs()}")
    expected, mine = _tensors(orderly, saved[-1]), _tensors(run.directory, saved[-1])
    other = [name for name, value in expected.items() if name not in mine or not torch.equal(value, mine[name])]
    report.expect(not other and expected.keys() == mine.keys(), f"not bit-equal to the orderly run: {other[:5]}")
    return report


def elastic(random: Random, place: Path) -> Report:
    """One loss of a random kind on a random node at a random step."""
    if forbidden():
        return Report()
    with Cluster(NODES, warm=True) as cluster:
        kind, victim, step = random.choice(KINDS), random.randrange(NODES), random.randrange(3, LAST // 2)
        return play(cluster, place, kind, victim, step)


def play(cluster: Cluster, place: Path, kind: str, victim: int, step: int) -> Report:
    """A loss of one of `KINDS`."""
    if kind == "back":
        return returned_node(cluster, place, victim, step)
    if kind == "stop":
        return stopped_growth(cluster, place, victim, step)
    return lost_node(cluster, place, kind, victim, step)


def lost_node(cluster: Cluster, place: Path, kind: str, victim: int, step: int) -> Report:
    report = Report(faults=1)
    path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    spoil = {"fault": f"report:{victim}:{step}", "rank": f"kill:{victim}:{step}"}.get(kind, "none:0:0")
    run = _group(cluster, place / "run", env={"PYTHONPATH": path, "PROBE_SPOIL": spoil, "PROBE_FAULT": "STOP_SAVED"})
    if kind in ("kill", "cut"):
        run.wait_for_step(step)
        cluster.kill(victim) if kind == "kill" else cluster.cut(victim)
    if kind == "absent":
        run.wait_for_step(step)
        only(cluster, victim, "launch.worker")[0].kill()
        _wait_for_generation(run, 2)
        cluster.kill(victim)
    others = [node for node in range(NODES) if node != victim]
    codes = [run.processes[node].wait(400) for node in others]
    expected = [9, 9] if kind == "rank" else [0, 0]  # a rank that dies at the same step again and again
    report.expect(codes == expected, f"{kind} of node {victim} at {step}: exit codes {codes}: {run.outputs()}")
    if kind == "fault":
        report.expect(run.processes[victim].wait(60) == 5, f"node {victim}: {run.processes[victim].output}")
    cluster.signal(victim, signal.SIGKILL)
    cluster.reset()
    saved = [entry.step for entry in CheckpointStore(place / "run" / "checkpoints").all()]
    if codes == [0, 0]:
        report.expect(len(saved) == 2, f"checkpoints {saved}")
        _compare(report, cluster, place, (others[0], others[1]), saved[0])
    return report


def elastic_briefly(random: Random, place: Path) -> Report:
    """The loss of node 0."""
    if forbidden():
        return Report()
    with Cluster(NODES, warm=True) as cluster:
        return lost_node(cluster, place, "kill", 0, random.randrange(3, 20))


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        with tempfile.TemporaryDirectory(prefix="torture-") as folder, Cluster(NODES, warm=True) as nodes:
            found = play(nodes, Path(folder), each, 1, 8)
        print(f"      F: {each:<6} | {'BROKEN' if found.broken else 'held'}", *found.broken, sep="\n", flush=True)
