"""A run in this process, rehearsed or real: functions for forked ranks."""

import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

STEP = ("forward", "backward", "clip", "step", "between")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes on one rank: what stays after a step, and the most during one."""

    resident: int
    peak: int


def rehearsed(words: Sequence[str], *, ranks: int = 1, kind: str = "cpu", micro_batch: int = 1, accumulation: int = 1, **more):
    """The rehearsal of `smalti train WORDS`, in this process."""
    from smalti.cli.arguments import CommandLine
    from smalti_plan.records import Candidate
    from smalti_plan.rehearsal.child import rehearsed
    from smalti_plan.rehearsal.request import Request

    config = CommandLine.parse(list(words)).config()
    candidate = Candidate(micro_batch=micro_batch, accumulation=accumulation)
    values = config.values() | {"plugins": list(config.value("plugins")), "without": list(config.value("without"))}
    request = Request(values=values, candidate=candidate, device="none", kind=kind, ranks=ranks, local=min(8, ranks), **more)
    return rehearsed(request, "none" if kind == "cpu" else "extension", [])


def measured(words: Sequence[str]) -> Measured:
    """What a rank of `smalti train WORDS` holds: the same phases with values, by an allocator that counts.

    The peak is the least of three steps: gloo's threads free a buffer late now and then, 4 % of the peak of a small model.
    """
    from support.allocations import counting

    if os.environ.get("WORLD_SIZE") == "1":  # a single rank has no launcher
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    with ExitStack() as closing:
        stage = opened(words, closing)
        gc.collect()
        allocations = counting()
        before = allocations.held
        example = stage.family.example_conditioning
        stage.family.example_conditioning = lambda *size: {name: finite(row) for name, row in example(*size).items()}
        stage.encode()
        before -= mapped(stage.family)
        stage.build()
        stage.weights = None
        for _ in range(2):  # DDP makes its buckets anew after the first
            stage.step()
        gc.collect()
        peaks = []
        for _ in range(3):
            allocations.most()
            stage.step()
            gc.collect()
            peaks.append(allocations.most() - before)
        return Measured(resident=allocations.held - before, peak=min(peaks))


def finite(row):
    """Texts whose gradients are finite, else steps would be left out."""
    return row.zero_() if row.is_floating_point() else row


def mapped(family) -> int:
    """Bytes of the autoencoder that a pipeline keeps. It is mapped from a file, and so nobody allocates it."""
    kept = getattr(vars(family).get("frozen"), "vae", None)
    return 0 if kept is None else sum(each.nbytes for each in (*kept.parameters(), *kept.buffers()))


def opened(words: Sequence[str], closing: ExitStack):
    """The stage of a run on this rank, with weights."""
    from smalti.cli.arguments import CommandLine
    from smalti.plugins import choose_distributed, find_family
    from smalti.training import open_parallel
    from smalti_plan.largest_bucket import largest_bucket
    from smalti_plan.rehearsal.ledger import Ledger
    from smalti_plan.rehearsal.stage import Stage

    command_line = CommandLine.parse(list(words))
    config, plugins = command_line.config(), command_line.plugins
    plan = choose_distributed(config, plugins)
    parallel = open_parallel(plan, config)
    closing.callback(parallel.close)
    family = find_family(config, plugins)
    return Stage(
        config=config,
        plugins=plugins,
        plan=plan,
        parallel=parallel,
        ledger=Ledger("cpu", 1),
        family=family,
        bucket=largest_bucket(config, plugins, family.alignment).bucket,
        weights=family.weights(0),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one rank: between steps, and at the peak of a step, which is in `phase`.

    `beside` are those of parts of the pipeline that are kept beside the model, which formulas leave to host memory.
    """

    resident: int
    peak: int
    phase: str
    beside: int = 0


def by_rehearsal(words: Sequence[str], *, ranks: int, micro: int, accumulation: int) -> Estimate:
    rehearsal = rehearsed(words, ranks=ranks, micro_batch=micro, accumulation=accumulation)
    if rehearsal.error is not None:
        raise RuntimeError(f"{rehearsal.error.message}\n{rehearsal.error.where}\n{rehearsal.error.traceback}")
    peaks = {phase: rehearsal.phases[phase].device.total for phase in STEP}
    phase = max(peaks, key=lambda name: peaks[name])
    return Estimate(resident=rehearsal.resident.total, peak=peaks[phase], phase=phase, beside=rehearsal.resident.frozen)


def by_formula(words: Sequence[str], *, strategy: str, recompute: str, micro: int, ranks: int, local: int) -> Estimate | None:
    """None if the planner does not propose this strategy on CPUs."""
    from smalti import HookSpecs, World
    from smalti.cli.arguments import CommandLine
    from smalti.parallel import device_models
    from smalti_plan.choices import estimate
    from smalti_plan.counted import count, request_of
    from smalti_plan.formulas.run_facts import RunFacts

    command_line = CommandLine.parse(list(words))
    config, plugins = command_line.config(), command_line.plugins
    world = World(size=ranks, local_size=local, device="cpu")
    found = plugins.gather(HookSpecs.propose_strategies, config=config, world=world)
    chosen = next((each for each in found if each.name == strategy), None)
    if chosen is None:
        return None
    model, run = count(request_of(config, "cpu")), RunFacts.of(config, plugins, "cpu")
    counted = estimate(model, run, chosen, recompute, micro, device_models()["h100-80g"], world).counted  # type: ignore[arg-type]
    peaks = {phase: peak.device.total for phase, peak in counted.phases.items() if phase in STEP}
    phase = max(peaks, key=lambda name: peaks[name])
    return Estimate(resident=counted.resident.total, peak=peaks[phase], phase=phase)
