"""What `smalti plan` says of memory against real ranks on gloo: a rehearsal of each run, its formula, and the run itself.

The runs are small Flux, SDXL and SD3 models in every strategy (`ROWS`). Real ranks are measured by an allocator
that counts what torch allocates, so scratch memory of torch's own kernels is in it, and that of oneDNN and MKL is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from run import Result
from sizes import sized

from smalti import HookSpecs, World
from smalti.cli.arguments import CommandLine
from smalti.parallel import device_models
from smalti_plan.choices import estimate
from smalti_plan.counted import facts_of
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.refine import rehearsed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/plan/tests"))

from planning.measured import by_formula, by_rehearsal, measured
from planning.pipelines import PIPELINES, pipeline, published_flux
from planning.rows import Row

from support.forked_ranks import forked_processes

_MIB = 2**20
ROWS = (
    Row(model="flux"),
    Row(model="flux", recompute="full", micro=2, accumulation=2, ema=True),
    Row(model="flux", bf16=True),
    Row(model="flux", lora=True, micro=2),
    Row(model="flux", lora=True, bf16=True, recompute="full"),
    Row(model="flux", strategy="ddp", ranks=2, accumulation=2),
    Row(model="flux", strategy="ddp", ranks=4, bf16=True, ema=True),
    Row(model="flux", strategy="fsdp2", ranks=2),
    Row(model="flux", strategy="fsdp2", ranks=4, bf16=True, recompute="full", ema=True),
    Row(model="flux", strategy="fsdp2", ranks=2, recompute="selective", micro=2),
    Row(model="flux", strategy="hsdp", ranks=4, accumulation=2),
    Row(model="flux", strategy="fsdp2", ranks=2, lora=True, bf16=True),
    Row(model="flux", strategy="fsdp2", ranks=2, offload=True),
    Row(model="flux", strategy="zero1", ranks=2, bf16=True),
    Row(model="flux", strategy="zero2", ranks=2, accumulation=2),
    Row(model="flux", strategy="zero2", ranks=2, bf16=True, offload=True),
    Row(model="flux", strategy="zero3", ranks=2, recompute="full"),
    Row(model="sdxl"),
    Row(model="sdxl", bf16=True, recompute="full", micro=2),
    Row(model="sdxl", lora=True),
    Row(model="sdxl", strategy="ddp", ranks=2, lora=True, bf16=True, accumulation=2),
    Row(model="sdxl", strategy="fsdp2", ranks=2, ema=True),
    Row(model="sdxl", strategy="fsdp2", ranks=4, bf16=True, recompute="selective"),
    Row(model="sdxl", strategy="zero1", ranks=4, accumulation=2),
    Row(model="sdxl", strategy="zero3", ranks=2, bf16=True, ema=True),
    Row(model="sd3"),
    Row(model="sd3", strategy="ddp", ranks=2, recompute="full", micro=2),
    Row(model="sd3", strategy="fsdp2", ranks=2, bf16=True, recompute="selective", accumulation=2),
    Row(model="sd3", strategy="hsdp", ranks=4, lora=True, recompute="full"),
    Row(model="sd3", strategy="zero2", ranks=4, bf16=True),
    Row(model="sd3", strategy="zero3", ranks=4, offload=True),
)
"""Every value of every factor is in several rows; not all combinations."""
ROWS = sized(ROWS, short=ROWS[:1])
BATCHES = sized((1, 4), short=())


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return [*(result for row in ROWS for result in compared(row, place)), *(large(place) if BATCHES else ())]


def compared(row: Row, folder: Path) -> Iterator[Result]:
    """One line for each of: bytes between steps, the peak by rehearsal, the peak by formula."""
    model = folder / row.model
    words = row.words(model if model.exists() else pipeline(row.model, model), folder)
    imports = (*PIPELINES, *(["deepspeed"] if "zero" in row.strategy else []))
    with forked_processes(ranks=1, group=False, imports=imports) as alone:
        [rehearsal] = alone.run(by_rehearsal, words, ranks=row.ranks, micro=row.micro, accumulation=row.accumulation)
    with forked_processes(ranks=1, group=False, imports=imports) as alone:
        [formula] = alone.run(
            by_formula,
            words,
            strategy=row.proposed,
            recompute=row.recompute,
            micro=row.micro,
            ranks=row.ranks,
            local=row.local,
        )
    with forked_processes(ranks=row.ranks, group=row.ranks > 1, imports=imports) as ranks:
        found = ranks.run(measured, words)[0]
    tolerance = 1.12 if row.bf16 else 1.02
    yield _result(f"plan: {row}: between steps, rehearsed", rehearsal.resident, found.resident, 1.001)
    yield _result(f"plan: {row}: peak ({rehearsal.phase}), rehearsed", rehearsal.peak, found.peak, tolerance)
    if formula is not None:
        resident, peak = formula.resident + rehearsal.beside, formula.peak + rehearsal.beside
        yield _result(f"plan: {row}: between steps, formula", resident, found.resident, 1.02)
        yield _result(f"plan: {row}: peak ({formula.phase}), formula", peak, found.peak, 1.15)


def large(folder: Path) -> Iterator[Result]:
    """The formula of FLUX.1 dev in full under FSDP2 on 8 GPUs, all activations recomputed, against its rehearsal."""
    model = published_flux(folder / "published")
    row = Row(model="flux", strategy="fsdp2", ranks=8, bf16=True, recompute="full")
    words = [each for each in row.words(model, folder) if each != "--use_cpu"]
    line = CommandLine.parse([*words, "--resolution=512", "--tokenizer_max_length=512"])  # 4,096 tokens of the tiny autoencoder
    config, plugins, device = line.config(), line.plugins, device_models()["h100-80g"]
    world = World(size=8, local_size=8, device="cuda")
    strategies = plugins.gather(HookSpecs.propose_strategies, config=config, world=world)
    [strategy] = (each for each in strategies if each.name == "fsdp2")
    facts, run = facts_of(config, plugins, "cuda"), RunFacts.of(config, plugins, "cuda")
    for micro in BATCHES:
        way = replace(run, effective_batch=8 * micro)
        formula = estimate(facts, way, strategy, "full", micro, device, world)
        rehearsal = rehearsed(formula, config, plugins, device)
        assert rehearsal.error is None, rehearsal.error
        name = f"plan: FLUX.1 dev, full, bf16, fsdp2 x8, recompute full, batch {micro}x1: peak, formula over rehearsed"
        yield _result(name, formula.counted.peak.total, rehearsal.counted.peak.total, 1.15)


def _result(name: str, predicted: int, real: int, goal: float) -> Result:
    """`ratio` is predicted over found. The goal counts in both directions: its inverse is the least."""
    ours, peer = round(predicted / _MIB, 3), round(real / _MIB, 3)
    return Result(name=name, ratio=round(predicted / real, 4), ours=ours, peer=peer, unit="MiB", goal=goal, pairs=1)
