"""H: a run over two nodes with data and checkpoints on S3, webhooks and watched GPUs; something fails every few seconds.

It is started again as docs/operations.md says of its exit codes, and has to end with the tensors of the undisturbed run. That
is one of two ranks, or of four with FSDP2: torch's DDP sums the first step of a launch in another order than the later ones,
which changes the rounding of a sum of more than two ranks.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from smalti.checkpoint import CheckpointStore, verify
from smalti_health.circuits import reset_circuit
from smalti_health.webhooks.delivery.sender import ORPHAN_SECONDS
from smalti_testing import ObjectStore, seaweed
from smalti_testing.http_receiver import Receiver, status
from smalti_testing.nvml import FakeNvml
from support.images import images_in
from support.nodes import Cluster, forbidden
from support.nodes.runs import Run

from ..runs import tensors
from ..subject import Report

PROBE = Path(__file__).parents[2] / "e2e" / "probe"
AGAIN = (5, 6, 9, 11, 75, 137, -signal.SIGKILL)
"""The exit codes of docs/operations.md after which the same command is to be run again; all else holds the run."""
END_SECONDS = 240.0
HEALTHY = "count 4"
BROKEN = ("ecc_uncorrected_volatile.{} 1", "recovery.{} 3")


@dataclass
class Soak:
    """The servers, the nodes, and what has happened so far."""

    chance: Random
    place: Path
    cluster: Cluster
    store: ObjectStore
    receiver: Receiver
    report: Report
    addresses: Mapping[str, str]
    drivers: list[FakeNvml] = field(default_factory=list)
    steps: int = 0
    ranks: int = 1
    """Of each node; several are sharded."""
    done: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def start(self, name: str) -> Run:
        entry = {
            "id": "pictures",
            "type": "aws",
            "aws_bucket_name": self.store.bucket,
            "aws_data_prefix": "pictures",
            "aws_endpoint_url": f"http://{self.addresses['s3']}",
            "minimum_image_size": 0,
        }
        data = self.place / "data.json"
        data.write_text(json.dumps([entry]))
        webhook = {"webhook_type": "raw", "callback_url": f"http://{self.addresses['hook']}/hook", "allow_private": True}
        shared = {
            "PYTHONPATH": str(PROBE),
            "PROBE_GPUS": HEALTHY,
            "AWS_ACCESS_KEY_ID": self.store.access_key,
            "AWS_SECRET_ACCESS_KEY": self.store.secret_key,
            "AWS_REGION": self.store.region,
            "SMALTI_WEBHOOK_CONFIG": json.dumps(webhook),
        }
        return Run(
            self.cluster,
            self.place / name,
            ranks=self.ranks,
            env=shared,
            own_env={node: driver.environment for node, driver in enumerate(self.drivers)},
            instance_data_dir=None,
            data_backend_config=data,
            checkpoint_mirror=f"s3://{self.store.bucket}/runs/{name}",
            checkpoint_mirror_endpoint_url=f"http://{self.addresses['s3']}",
            checkpoint_step_interval=5,
            checkpoints_total_limit=2,
            max_train_steps=self.steps,
            process_group_timeout=8,
            rendezvous_timeout=30,
            gpu_health_interval=0.5,
            use_ema="true",
            lr_scheduler="cosine",
            fsdp_enable="true" if self.ranks > 1 else None,
        )

    # --- what fails -------------------------------------------------------------------------------------------------

    def worker_killed(self, run: Run) -> None:
        node = self.chance.randrange(2)
        workers = [each for each in self.cluster.processes(node) if "smalti.launch.worker" in each.cmdline()[1:4]]
        if workers:
            self.chance.choice(workers).kill()

    def node_killed(self, run: Run) -> None:
        self.cluster.kill(self.chance.randrange(2))

    def all_killed(self, run: Run) -> None:
        for node in (0, 1):
            self.cluster.kill(node)

    def node_asked_to_stop(self, run: Run) -> None:
        self.cluster.signal(self.chance.randrange(2), signal.SIGTERM)

    def smalti_asked_to_stop(self, run: Run) -> None:
        self.chance.choice(run.processes).send_signal(self.chance.choice((signal.SIGTERM, signal.SIGUSR1)))

    def link_cut(self, run: Run) -> None:
        self.cluster.cut(1)

    def link_away(self, run: Run) -> None:
        self.cluster.cut(1)
        time.sleep(self.chance.uniform(0.1, 3))
        self.cluster.heal(1)

    def node_paused(self, run: Run) -> None:
        node = self.chance.randrange(2)
        self.cluster.pause(node)
        time.sleep(self.chance.uniform(0.1, 3))
        self.cluster.resume(node)

    def gpu_fails(self, run: Run) -> None:
        node = self.chance.randrange(2)
        gpu = self.ranks * node + self.chance.randrange(self.ranks)
        self.drivers[node].set(HEALTHY, self.chance.choice(BROKEN).format(gpu))

    def store_away(self, run: Run) -> None:
        self.store.pause()
        time.sleep(self.chance.uniform(0.1, 4))
        self.store.resume()

    def store_killed(self, run: Run) -> None:
        self.store.kill()
        time.sleep(self.chance.uniform(0, 2))
        self.store.restart()

    def receiver_fails(self, run: Run) -> None:
        self.receiver.default = status(self.chance.choice((500, 503, 429)))

    def directory_lost(self, run: Run) -> None:
        """All processes are killed, and the run directory is gone: the mirror has the checkpoints."""
        self.all_killed(run)
        self.cluster.leftovers()
        if self.store.keys(f"runs/{run.directory.name}/"):
            run.directory.rename(self.place / f"lost-{sum(self.done.values())}")


DISTURBANCES: tuple[tuple[Callable[[Soak, Run], None], int], ...] = (
    (Soak.worker_killed, 3),
    (Soak.node_killed, 3),
    (Soak.all_killed, 2),
    (Soak.node_asked_to_stop, 3),
    (Soak.smalti_asked_to_stop, 3),
    (Soak.link_cut, 1),
    (Soak.link_away, 2),
    (Soak.node_paused, 2),
    (Soak.gpu_fails, 3),
    (Soak.store_away, 2),
    (Soak.store_killed, 1),
    (Soak.receiver_fails, 2),
    (Soak.directory_lost, 1),
)
"""With weights."""


def soak(chance: Random, place: Path, *, steps: int = 400, least: int = 6) -> Report:
    """H: something fails every few seconds until the run is complete."""
    report = Report()
    if reason := forbidden():
        print(f"      H: not possible here: {reason}", flush=True)
        return report
    with Cluster(2, warm=True) as cluster, seaweed(place / "store") as store, Receiver() as receiver:
        for path in images_in(cluster.place / "images", 12, (24, 24)).iterdir():
            store.request("PUT", f"pictures/{path.name}", path.read_bytes())
        addresses = {"s3": cluster.relay(store._port), "hook": cluster.relay(receiver.port)}
        trial = Soak(chance, place, cluster, store, receiver, report, addresses, steps=steps, ranks=chance.choice((1, 2)))
        for node in (0, 1):
            folder = place / f"driver-{node}"
            folder.mkdir()
            trial.drivers.append(FakeNvml(folder))
            trial.drivers[node].set(HEALTHY)
        whole = trial.start("whole")
        codes = whole.codes(600)
        report.expect(codes == [0, 0], f"the undisturbed run ends with {codes}: {whole.outputs()[0][-1500:]}")
        if codes == [0, 0]:
            _until_complete(trial)
            report.expect(report.faults >= least, f"only {report.faults} disturbances")
            _compare(trial)
    print(f"      H: {2 * trial.ranks} ranks; {dict(trial.done)}; exit codes {dict(trial.codes)}", flush=True)
    return report


def soak_briefly(chance: Random, place: Path) -> Report:
    """H in short."""
    return soak(chance, place, steps=100, least=1)


def _until_complete(trial: Soak) -> None:
    """The supervisor: start the run, disturb it, judge how it ends, and start it again as its exit codes say."""
    faults = 0
    for _ in range(200):
        _heal(trial)
        run = trial.start("disturbed")
        names = _disturb(trial, run)
        codes = _ended(trial, run)
        if codes is None:
            trial.report.broken.append(f"after {names} a node has not ended: {[each[-1500:] for each in run.outputs()]}")
            return
        trial.codes[" / ".join(map(str, sorted(codes)))] += 1
        faults += 5 in codes
        if codes == [0, 0]:
            break
        held = [code for code in codes if code not in (*AGAIN, 0)]
        if held:
            trial.report.broken.append(f"after {names}: exit codes {codes}: {[each[-1500:] for each in run.outputs()]}")
            return
        left = trial.cluster.leftovers(ORPHAN_SECONDS + 15)  # a webhook may be tried again for so long after its rank
        trial.report.expect(not left, f"after {names}: processes are left: {left}")
    trial.receiver.default = status(204)
    sent = {each.id for each in trial.receiver.requests if each.json["type"] == "gpu.fault"}
    trial.report.expect(len(sent) >= faults, f"{faults} launches ended with a fault, {len(sent)} webhooks of faults")


def _heal(trial: Soak) -> None:
    trial.cluster.heal(1)
    trial.receiver.default = status(204)
    for node, driver in enumerate(trial.drivers):
        driver.set(HEALTHY)
        if (trial.place / "disturbed").exists():
            reset_circuit(trial.place / "disturbed", node)


def _disturb(trial: Soak, run: Run) -> list[str]:
    """Disturbances, until the run has ended or has to."""
    names: list[str] = []
    try:
        run.wait_for_step(1, 120)
        while all(each.poll() is None for each in run.processes) and len(names) < 6:
            time.sleep(trial.chance.uniform(0, 2.5))
            if any(each.poll() is not None for each in run.processes):
                break
            [disturb] = trial.chance.choices([each for each, _ in DISTURBANCES], [weight for _, weight in DISTURBANCES])
            names.append(disturb.__name__)
            trial.done[disturb.__name__] += 1
            trial.report.faults += 1
            disturb(trial, run)
    except RuntimeError:
        names.append("nothing, before its first step")
    return names


def _ended(trial: Soak, run: Run) -> list[int] | None:
    """The exit codes; a run that no disturbance ended goes on to its end."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        if all(each.poll() is not None for each in run.processes):
            return run.codes()
        time.sleep(0.1)
    return None


def _compare(trial: Soak) -> None:
    expected, found = tensors(trial.place, "whole"), tensors(trial.place, "disturbed")
    different = [name for name in expected if expected[name] != found.get(name)]
    trial.report.expect(
        not different and len(expected) == len(found), f"of {len(expected)} tensors {len(different)} differ: {different[:5]}"
    )
    entry = CheckpointStore(trial.place / "disturbed" / "checkpoints").all()[-1]
    trial.report.expect(entry.step == trial.steps and verify(entry.path).ok, f"the last checkpoint is that of {entry.step}")
    secret = trial.store.secret_key.encode()
    for path in (trial.place / "disturbed").rglob("*.json*"):
        trial.report.expect(not path.is_file() or secret not in path.read_bytes(), f"{path.name} has a secret")
