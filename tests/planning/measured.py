"""A run in this process, rehearsed or real: functions for forked ranks."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes as torch's allocator has reported them: what stays after a step, and the most during one."""

    resident: int
    peak: int


def rehearsed(words: Sequence[str], *, ranks: int = 1, kind: str = "cpu", micro_batch: int = 1, accumulation: int = 1, **more):
    """The rehearsal of `smalti train WORDS`, in this process."""
    from smalti.cli.arguments import CommandLine
    from smalti.planning import Candidate
    from smalti.planning.rehearsal.child import rehearsed
    from smalti.planning.rehearsal.request import Request

    config = CommandLine.parse(list(words)).config()
    candidate = Candidate(micro_batch=micro_batch, accumulation=accumulation)
    values = config.values() | {"plugins": list(config.value("plugins")), "without": list(config.value("without"))}
    request = Request(values=values, candidate=candidate, device="none", kind=kind, ranks=ranks, local=min(8, ranks), **more)
    return rehearsed(request, "none" if kind == "cpu" else "extension", [])


def measured(words: Sequence[str]) -> Measured:
    """What a rank of `smalti train WORDS` holds after and during its third step: the same phases with values.

    By torch's profiler, unless weights are sharded: it does not see what gloo's threads free. Then by the ledger of
    rehearsals, on real tensors.
    """
    if os.environ.get("WORLD_SIZE") == "1":  # a single rank has no launcher
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    with ExitStack() as closing:
        stage = opened(words, closing)
        if stage.plan.shards:
            return by_ledger(stage)
        stage.encode()
        with allocations() as building:
            stage.build()
            stage.weights = None
            for _ in range(2):  # DDP makes its buckets anew after the first
                stage.step()
        with allocations() as stepping:
            stage.step()
        return Measured(resident=building[0] + stepping[0], peak=building[0] + stepping[1])


def by_ledger(stage) -> Measured:
    with stage.ledger:
        stage.encode()
        stage.build()
        stage.weights = None
        for _ in range(2):
            stage.step()
        stage.ledger.moments.clear()
        stage.step()
    peak = max(moment.total for moment in stage.ledger.moments.values())
    return Measured(resident=sum(stage.resident[0].values()), peak=peak)


def opened(words: Sequence[str], closing: ExitStack):
    """The stage of a run on this rank, with weights."""
    from smalti.cli.arguments import CommandLine
    from smalti.planning.rehearsal.ledger import Ledger
    from smalti.planning.rehearsal.samples import largest_square
    from smalti.planning.rehearsal.stage import Stage
    from smalti.plugins import choose_distributed, find_family
    from smalti.training import open_parallel

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
        bucket=largest_square(config, family.alignment),
        weights=family.weights(0),
    )


@contextmanager
def allocations():
    """A list that afterwards has the change in allocated bytes, and the most above the beginning."""
    import torch

    found: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    held = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        most = max(most, held)
    found += [held, most]
