"""I: two workers that Ray places, of which a process, a node or the driver is lost at a random step, once or twice.

The end is bit by bit that of two ranks of one machine that lost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from support.ray_launches import LOSSES, Launch, local, lose, tensors
from support.raylets import Raylets

from .subject import Report

LAST = 200
TIMES_OUT = 600
"""Seconds from the last loss to the end. A launch takes about 30 on two cores."""


def on_ray(chance: Random, place: Path) -> Report:
    return _round(chance, place, [chance.choice(LOSSES) for _ in range(chance.choice((1, 2)))])


def on_ray_briefly(chance: Random, place: Path) -> Report:
    """One loss that starts no further node."""
    return _round(chance, place, ["worker"])


def _round(chance: Random, place: Path, losses: Sequence[str]) -> Report:
    report = Report(faults=len(losses))
    expected = tensors(local(place, max_train_steps=LAST), LAST)
    cluster = Raylets(place)
    try:
        for _ in range(2):
            cluster.add()
        launch = Launch(cluster, place, "run", "--workers=2", max_train_steps=LAST)
        try:
            _lose_in_turn(chance, cluster, launch, losses)
            code = launch.code(TIMES_OUT)
            happened = f"{', '.join(losses)}:\n{launch.output}"
        finally:
            launch.close()
        report.expect(code == 0, f"ended with {code} after {happened}")
        if code == 0:
            found = tensors(launch.directory, LAST)
            other = [name for name, value in expected.items() if name not in found or not torch.equal(value, found[name])]
            report.expect(not other and found.keys() == expected.keys(), f"not bit-equal: {other[:5]} after {happened}")
    finally:
        cluster.close()
    return report


def _lose_in_turn(chance: Random, cluster: Raylets, launch: Launch, losses: Sequence[str]) -> None:
    """Each at a random step after the last. A node that is taken away leaves room on another one."""
    step = 0
    for number, what in enumerate(losses):
        if what in ("raylet", "drained node"):
            cluster.add()
        step = chance.randrange(step + 1, LAST * (number + 1) // len(losses) - 20)
        launch.wait_for_step(step)
        time.sleep(chance.random() / 5)
        lose(what, cluster, launch)
