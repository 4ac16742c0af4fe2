"""`make torture`: faults against everything that is promised, by seed, until the time is up.

    make torture ARGS="--seconds 60"                a minute of everything
    make torture ARGS="--seed 7 --group A2 A3"      some groups
    make torture ARGS="--group A1 --case 123456"    one round again, as a failure tells it
    make torture ARGS="--short"                     one round of each, and of real runs one that starts few

Prints a line for each promise that did not hold, with the words that play it again, and a summary. Exit code 1 if any did not.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from .accelerator_faults import agreed, agreed_once, loops, paused, slow_ranks, software
from .damage import damaged, rotated
from .data import bad_inputs_and_tables, changing_worlds, failing_threads, resumed_anywhere, resumed_briefly
from .gpu_health import failing_drivers, failing_gpus, healthy_gpus, one_failing_driver
from .hostile import hostile
from .nodes.elastic import elastic, elastic_briefly
from .nodes.faults import faults_on_nodes, one_fault_on_nodes
from .nodes.scenarios import one_scenario, scenarios
from .nodes.slurm import one_slurm_job, slurm_jobs
from .nodes.soak import soak, soak_briefly
from .object_store import faulty_requests, few_faulty_requests
from .on_ray import on_ray, on_ray_briefly
from .phases import killed_in_phases, killed_in_phases_briefly
from .plugging import plugged
from .power_cut import power_cut
from .remote_data import faulty_network, faulty_network_once
from .remote_saves import faulty_checkpoints, few_faulty_checkpoints
from .resharding import resharded
from .runs import resumed, resumed_once, stopped, stopped_once
from .saves import crashed, killed, refused
from .store_failures import many_keys, racing_writers, refused_requests, stopping_server
from .subject import Report
from .webhooks import failing_receivers, few_failing_receivers

Round = Callable[[random.Random, Path], Report]
GROUPS: dict[str, tuple[str, Round, int]] = {
    "A1": ("SIGKILL at a random moment of a save", killed, 3),
    "A2": ("crash at every operation of a save", crashed, 3),
    "A3": ("power cut", power_cut, 3),
    "A4": ("operations refused, disk full", refused, 2),
    "A5": ("damaged checkpoints", damaged, 1),
    "A6": ("rotation", rotated, 1),
    "A7": ("read by other numbers of ranks", resharded, 3),
    "A8": ("runs killed until done", resumed, 8),
    "A9": ("runs stopped by signals", stopped, 5),
    "A10": ("hostile checkpoints", hostile, 2),
    "B1": ("faults between client and object store", faulty_requests, 3),
    "B2": ("checkpoints on S3, a fifth of requests fails", faulty_checkpoints, 3),
    "B3": ("object stores killed or paused", stopping_server, 2),
    "B4": ("wrong keys, clocks and permissions", refused_requests, 1),
    "B5": ("writers that race", racing_writers, 1),
    "B6": ("long listings, abandoned uploads", many_keys, 1),
    "C1": ("data resumed anywhere", resumed_anywhere, 2),
    "C2": ("data for other numbers of ranks", changing_worlds, 1),
    "C3": ("bad images and tables", bad_inputs_and_tables, 1),
    "C4": ("data on S3, with 5 % faults", faulty_network, 1),
    "C5": ("loader threads that fail", failing_threads, 1),
    "C6": ("killed while indexing, encoding, training", killed_in_phases, 4),
    "D1": ("GPUs that fail", failing_gpus, 1),
    "D2": ("GPUs that are well", healthy_gpus, 1),
    "D3": ("drivers that hang or fail", failing_drivers, 1),
    "D4": ("faults of accelerators, agreed stops", agreed, 3),
    "D5": ("ranks that are stopped", paused, 1),
    "D6": ("slow ranks", slow_ranks, 1),
    "D7": ("errors of programs, not of devices", software, 1),
    "D8": ("the same fault again and again", loops, 1),
    "D9": ("faults of accelerators over two nodes", faults_on_nodes, 3),
    "D10": ("nodes that are lost, cut, stopped, different", scenarios, 3),
    "D11": ("jobs of SLURM on nodes that are lost or drained", slurm_jobs, 3),
    "E": ("webhooks whose receivers fail", failing_receivers, 2),
    "F": ("groups of nodes that lose one", elastic, 2),
    "G": ("broken plugins", plugged, 2),
    "H": ("soak over two nodes, S3, webhooks, GPUs", soak, 6),
    "I": ("parts of a Ray cluster that are lost", on_ray, 2),
}
"""Title, one round, share of the time."""
SHORT = {
    agreed: agreed_once,
    scenarios: one_scenario,
    elastic: elastic_briefly,
    slurm_jobs: one_slurm_job,
    soak: soak_briefly,
    faults_on_nodes: one_fault_on_nodes,
    resumed: resumed_once,
    stopped: stopped_once,
    resumed_anywhere: resumed_briefly,
    killed_in_phases: killed_in_phases_briefly,
    faulty_requests: few_faulty_requests,
    faulty_checkpoints: few_faulty_checkpoints,
    faulty_network: faulty_network_once,
    failing_drivers: one_failing_driver,
    failing_receivers: few_failing_receivers,
    on_ray: on_ray_briefly,
}
SERVERS = {faulty_requests, faulty_checkpoints, stopping_server, refused_requests, racing_writers, many_keys, faulty_network}
REAL = {
    faults_on_nodes,
    scenarios,
    elastic,
    on_ray,
    soak,
    killed,
    resumed,
    stopped,
    killed_in_phases,
    agreed,
    paused,
    *SERVERS,
    *SHORT.values(),
}
"""Rounds that need a disk below them, or its space; those that fake a crash do not, and one without spares much time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="the same faults again; random if not given")
    parser.add_argument("--seconds", type=float, default=300, help="for all groups together; each has one round at least")
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS), help="only these")
    parser.add_argument("--short", action="store_true", help="one round each, with few real runs")
    parser.add_argument("--case", type=int, help="one round with this seed, of one group")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"torture: seed {seed}", flush=True)
    weights = sum(GROUPS[name][2] for name in arguments.group)
    bad = 0
    for name in arguments.group:
        once = arguments.short or arguments.case is not None
        seconds = 0 if once else arguments.seconds * GROUPS[name][2] / weights
        bad += run_group(name, seed, seconds, arguments.case, short=arguments.short)
    print("torture: every promise held" if not bad else f"torture: {bad} promises did not hold", flush=True)
    return 1 if bad else 0


def run_group(name: str, seed: int, seconds: float, case: int | None, *, short: bool) -> int:
    """Rounds of one group until its time is up, one at least; how many promises did not hold."""
    title, play, _ = GROUPS[name]
    play = SHORT.get(play, play) if short else play
    chooser = random.Random(f"{seed} {name}")
    begin, rounds, faults, broken = time.monotonic(), 0, 0, 0
    while rounds == 0 or time.monotonic() - begin < seconds:
        number = chooser.randrange(10**9) if case is None else case
        report = play_once(play, number)
        rounds, faults, broken = rounds + 1, faults + report.faults, broken + len(report.broken)
        again = f"--group {name} --case {number}" + (" --short" if short else "")
        for told in report.broken:
            print(f'  {name}: {told}\n    again: make torture ARGS="{again}"', flush=True)
        if not report.faults and not report.broken:
            break  # it has said what it lacks here
    spent = time.monotonic() - begin
    print(
        f"{name:>4}  {title:<38} {faults:>6} faults  {broken:>3} broken promises  {rounds:>4} rounds  {spent:6.1f} s",
        flush=True,
    )
    return broken


def play_once(play: Round, case: int) -> Report:
    memory = Path("/dev/shm")
    fake = play not in REAL and os.access(memory, os.W_OK)
    place = Path(tempfile.mkdtemp(prefix="torture-", dir=memory if fake else None))
    try:
        return play(random.Random(case), place)
    except Exception:  # noqa: BLE001 - told with its traceback, and the other groups go on
        return Report(broken=[f"the round ended with an error\n{traceback.format_exc()}"])
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.WARNING)  # a line for each bad image
    warnings.filterwarnings("ignore", module="PIL")
    sys.exit(main())
