"""Ways to train on two gloo ranks: CPU seconds of a step as measured, and as the planner says after `--measure`.

All ways take turns, three steps at a time in two new processes, because other load on the machine changes its speed; for the
same reason CPU seconds are compared. The planner knows the measured time of DDP, and what two ranks reach in collective
operations, AdamW and dispatching. Two ways whose measured times overlap count as equally fast. `python bench/ranking.py` prints
a table.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "bench"), str(ROOT / "tests")]  # ranks have this file, and no path to the others
from sizes import sized  # noqa: E402

from support.forked_ranks import forked_processes  # noqa: E402

if TYPE_CHECKING:
    from run import Result

    from smalti.types import Recompute

ROUNDS, STEPS, WARM_UP = sized((3, 3, 2), short=(1, 1, 1))
RANKS = 2
TOY = {
    "model_family": "toy",
    "toy_width": sized(256, short=32),
    "toy_depth": sized(4, short=1),
    "toy_heads": 4,
    "resolution": 32,
    "resolution_type": "pixel",
    "mixed_precision": "no",
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_train_steps": 1000,
    "num_processes": RANKS,
    "use_cpu": "true",
    "without": "plots",
}


class Way(NamedTuple):
    """One row. `strategy`, `recompute` and the sizes are what the planner calls it."""

    title: str
    strategy: str
    recompute: Recompute = "none"
    micro_batch: int = 4
    accumulation: int = 1
    flags: tuple[str, ...] = ()


def zero(stage: int) -> str:
    return f'--deepspeed_config={{"zero_optimization": {{"stage": {stage}}}}}'


SHARDED, FULL = "--fsdp_enable", "--fsdp_activation_checkpointing"
WAYS: tuple[Way, ...] = (
    Way(title="DDP", strategy="ddp"),
    Way(title="DDP, recomputed", strategy="ddp", recompute="full", flags=("--gradient_checkpointing",)),
    Way(title="DDP, 1x4", strategy="ddp", micro_batch=1, accumulation=4),
    Way(title="FSDP2", strategy="fsdp2", flags=(SHARDED,)),
    Way(title="FSDP2, not resharded", strategy="fsdp2", flags=(SHARDED, "--no_fsdp_reshard_after_forward")),
    Way(title="FSDP2, recomputed", strategy="fsdp2", recompute="full", flags=(SHARDED, FULL)),
    Way(title="FSDP2, 1x4", strategy="fsdp2", micro_batch=1, accumulation=4, flags=(SHARDED,)),
    Way(title="ZeRO 2", strategy="zero-2", flags=(zero(2),)),
    Way(title="ZeRO 3", strategy="zero-3", flags=(zero(3),)),
    Way(title="ZeRO 3, 1x4", strategy="zero-3", micro_batch=1, accumulation=4, flags=(zero(3),)),
)
WAYS = sized(WAYS, short=(WAYS[1], WAYS[3], WAYS[8]))


def words(way: Way, folder: Path) -> list[str]:
    values = {**TOY, "train_batch_size": way.micro_batch, "gradient_accumulation_steps": way.accumulation}
    own = {"instance_data_dir": folder, "output_dir": folder / "run"}
    return [*(f"--{name}={value}" for name, value in (values | own).items()), *way.flags]


def steps(arguments: Sequence[str]) -> float:
    """CPU seconds of a step on this rank, of all its threads."""
    with ExitStack() as closing:
        stage = opened(arguments, closing)
        for _ in range(WARM_UP):
            stage.train()
        begun = cpu_seconds()
        for _ in range(STEPS):
            stage.train()
        return (cpu_seconds() - begun) / STEPS


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def opened(arguments: Sequence[str], closing: ExitStack) -> Any:
    """A run on this rank, with weights, on data that are made up."""
    from smalti.cli.arguments import CommandLine
    from smalti.plugins import choose_distributed, find_family
    from smalti.training import open_parallel, train_step
    from smalti_plan.largest_bucket import largest_bucket
    from smalti_plan.rehearsal.ledger import Ledger
    from smalti_plan.rehearsal.stage import Stage

    command_line = CommandLine.parse(list(arguments))
    config, plugins = command_line.config(), command_line.plugins
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    closing.callback(parallel.close)
    family = find_family(config, plugins)

    class Real(Stage):
        def train(self) -> None:
            self.run.boundary.reach()
            train_step(self.run, self.samples.batch(self.run.loss))
            self.run.state.step += 1

    stage = Real(
        config=config,
        plugins=plugins,
        plan=plan,
        parallel=parallel,
        ledger=Ledger("cpu", 1),
        family=family,
        bucket=largest_bucket(config, plugins, family.alignment).bucket,
        weights=family.weights(0),
    )
    stage.encode()
    stage.build()
    stage.weights = None
    return stage


def measured(ways: Sequence[Way], folder: Path) -> dict[str, list[float]]:
    """CPU seconds of a step by way, round by round: the mean of both ranks."""
    found: dict[str, list[float]] = {way.title: [] for way in ways}
    for number in range(ROUNDS):
        for way in ways:
            with forked_processes(ranks=RANKS, group=False, seconds=600) as pair:
                taken = pair.run(steps, words(way, folder))
            found[way.title].append(sum(taken) / RANKS)
            print(f"round {number + 1}, {way.title}: {taken}", file=sys.stderr, flush=True)
    return found


def planned(ways: Sequence[Way], known: float, folder: Path) -> dict[str, float]:
    """Seconds of a step by way, if one of the first way takes `known`."""
    from smalti.cli.arguments import CommandLine
    from smalti.parallel import device_models
    from smalti.types import World
    from smalti_plan.calibration import fitted
    from smalti_plan.choices import estimate, strategies_for
    from smalti_plan.counted import facts_of
    from smalti_plan.formulas.run_facts import RunFacts
    from smalti_plan.rates import measure_rates

    world = World(size=RANKS, local_size=RANKS, device="cpu")
    device = replace(device_models()["l4"], name="cpu", kind="cpu")  # its peaks cancel out
    rates, calibration = measure_rates(RANKS, "cpu", "cpu"), None
    print(rates, file=sys.stderr)
    found = {}
    for way in ways:
        command_line = CommandLine.parse(words(way, folder))
        config, plugins = command_line.config(), command_line.plugins
        run, model = RunFacts.of(config, plugins, "cpu"), facts_of(config, plugins, "cpu")
        [strategy] = [each for each in strategies_for(config, plugins, world) if each.name == way.strategy]
        if calibration is None:
            calibration = fitted(
                estimate(model, run, strategy, way.recompute, way.micro_batch, device, world), model, run, device, rates, known
            )
        efficiencies = calibration.efficiencies(device, run.products)
        way_found = estimate(model, run, strategy, way.recompute, way.micro_batch, device, world, efficiencies)
        found[way.title] = way_found.seconds
    return found


def compared() -> tuple[dict[str, list[float]], dict[str, float]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        times = measured(WAYS, Path(folder))
        return times, planned(WAYS, median(times[WAYS[0].title]), Path(folder))


def disagreements(times: dict[str, list[float]], plan: dict[str, float]) -> tuple[list[tuple[str, str]], int]:
    """Pairs of which the planner has the slower one first, and the number of pairs that are not equally fast."""
    ordered = [(fast, slow) for fast in times for slow in times if max(times[fast]) < min(times[slow])]
    return [(fast, slow) for fast, slow in ordered if plan[fast] > plan[slow]], len(ordered)


def spearman(times: dict[str, list[float]], plan: dict[str, float]) -> float:
    """The correlation of the two orders."""
    first, second = (sorted(times, key=key) for key in (lambda title: median(times[title]), lambda title: plan[title]))
    count = len(times)
    squares = sum((place - second.index(title)) ** 2 for place, title in enumerate(first))
    return 1 - 6 * squares / (count * (count**2 - 1))


def measure() -> list[Result]:
    from run import Result, paired

    times, plan = compared()
    wrong, of = disagreements(times, plan)
    order = Result(
        name="ranking: pairs of ways in the other order than measured",
        ratio=round(len(wrong) / max(of, 1), 4),
        ours=len(wrong),
        peer=of,
        unit="pairs",
        goal=0.1,
        pairs=ROUNDS,
    )
    return [
        order,
        *(
            paired(
                f"ranking: step planned over measured, {title}", [plan[title]] * ROUNDS, times[title], unit="CPU s", goal=1.25
            )
            for title in times
        ),
    ]


if __name__ == "__main__":
    times, plan = compared()
    for title in sorted(times, key=lambda title: median(times[title])):
        each = times[title]
        print(f"{title:<24} measured {median(each):.3f} ({min(each):.3f} to {max(each):.3f})  planned {plan[title]:.3f}")
    wrong, of = disagreements(times, plan)
    print(f"Spearman's rank correlation {spearman(times, plan):.3f}; {len(wrong)} of {of} pairs in the other order: {wrong}")
