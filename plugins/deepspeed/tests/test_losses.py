"""ZeRO trains what replicas train: the same losses, whatever is cut and wherever it lies."""

import json

import pytest

from smalti.testing import two_processes
from smalti.testing.strategy_subject import open_strategy

STEPS = 20
ALL_CUT = {"stage3_param_persistence_threshold": 0}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def zero(stage: int, **settings: object) -> tuple[str, ...]:
    document = {"zero_optimization": {"stage": stage, **settings}}
    return (f"--deepspeed_config={json.dumps(document)}",)


KINDS = {
    "1": zero(1),
    "2": zero(2),
    "3": zero(3, **ALL_CUT),
    "3 with small parameters whole": zero(3),
    "3 offloaded": zero(3, **ALL_CUT, **ON_HOST),
}
TOLERANCE = {"3 offloaded": 1e-4}
"""Largest relative difference in fp32. DeepSpeed's Adam for CPUs rounds in other places than torch's."""


def losses(plugin: str, flags: tuple[str, ...]) -> list[float]:
    """The mean loss of all ranks before each of the first steps, with clipping."""
    subject = open_strategy(plugin, flags, 2)
    found = []
    for number in range(STEPS):
        mine = subject.look(number)
        found.append(sum(float(text) for text in subject.parallel.share(repr(mine))) / 2)
        subject.step(number, limit=0.05)
    return found


@pytest.fixture(scope="module")
def ranks():
    with two_processes(group=False, seconds=240) as processes:  # DeepSpeed compiles Adam for CPUs when it first needs it
        yield processes


@pytest.fixture(scope="module")
def replicas(ranks):
    """By precision."""
    return {precision: ranks.run(losses, "ddp", (f"--mixed_precision={precision}",))[0] for precision in ("no", "bf16")}


def furthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_fp32_are_those_of_replicas(ranks, replicas, kind):
    found = ranks.run(losses, "deepspeed", KINDS[kind])[0]
    print("DIFF", kind, furthest(found, replicas["no"]))
    assert furthest(found, replicas["no"]) < TOLERANCE.get(kind, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_bf16_are_those_of_replicas(ranks, replicas, kind):
    found = ranks.run(losses, "deepspeed", (*KINDS[kind], "--mixed_precision=bf16"))[0]
    print("DIFF", kind, furthest(found, replicas["bf16"]))
    assert furthest(found, replicas["bf16"]) < 3e-3
