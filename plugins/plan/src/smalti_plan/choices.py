"""The ways to train a configuration that keep its effective batch, each estimated by formulas and put in order. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from smalti import Communication, FrozenStorage, Recompute, Strategy, UserError, World
from smalti.config import Config, DataOptions
from smalti.hookspecs import HookSpecs
from smalti.parallel import DeviceModel
from smalti.plugins import Plugins
from smalti_plan.facts import ModelFacts
from smalti_plan.fit import Fit, fit_of
from smalti_plan.formulas.memory import memory_of, sent_bytes
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.formulas.time import FAST, SLOW, Efficiency, StepTime, time_of
from smalti_plan.records import Candidate, Rehearsal, RehearsalError, Traffic

_RESIDENT = "resident_gib"
"""The option of a strategy that streams frozen weights for how many GiB of them stay on the device."""
_ORDER = {"fits": 0, "tight": 1, "does not fit": 2}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train on `world`: what it takes, whether it fits, and how long a step takes at best and at worst."""

    strategy: Strategy
    candidate: Candidate
    world: World
    counted: Rehearsal
    fit: Fit
    fastest: StepTime
    slowest: StepTime
    effective_batch: int
    error: RehearsalError | None = None
    """What a run would end with, as a rehearsal has found."""

    @property
    def seconds(self) -> float:
        """The middle of the range, by which choices are compared."""
        return math.sqrt(self.fastest.seconds * self.slowest.seconds)

    @property
    def samples_per_second(self) -> float:
        return self.effective_batch / self.seconds

    @property
    def options(self) -> dict[str, object]:
        """What to set for it: values by option."""
        return {
            **self.strategy.options,
            **self.strategy.recompute[self.candidate.recompute],
            "train_batch_size": self.candidate.micro_batch,
            "gradient_accumulation_steps": self.candidate.accumulation,
            "num_processes": self.world.size,
        }


def strategies_for(config: Config, plugins: Plugins, world: World, *, combined: bool = False) -> list[Strategy]:
    """What all plugins propose, each with the defaults of what the configuration sets for another strategy.

    With `combined`, ways to save memory are added to strategies in all combinations; else such ways are left out.
    """
    found = plugins.gather(HookSpecs.propose_strategies, config=config, world=world)
    added = [each for each in found if each.added_to]
    found = [each for each in found if not each.added_to]
    for way in added if combined else ():
        found += [_with_way(each, way) for each in found if each.origin.plugin in way.added_to]
    used = {name for each in found for options in (each.options, *each.recompute.values()) for name in options}
    unset = {
        name: option.default
        for name, option in config.schema.options.items()
        if name in used and config.value(name) != option.default
    }
    return [replace(each, options={**unset, **each.options}) for each in found]


def _with_way(strategy: Strategy, way: Strategy) -> Strategy:
    """A strategy with a way to save memory in addition."""
    modes = {mode: {**options, **way.recompute[mode]} for mode, options in strategy.recompute.items() if mode in way.recompute}
    return replace(
        strategy,
        name=f"{strategy.name}-{way.name}",
        title=f"{strategy.title}, {way.title}",
        options={**strategy.options, **way.options},
        recompute=modes,
        bytes={**strategy.bytes, **way.bytes},
        offloaded=strategy.offloaded | way.offloaded,
        reduced_bytes=strategy.reduced_bytes + way.reduced_bytes,
        buffers=strategy.buffers + way.buffers,
        buffers_per_parameter=strategy.buffers_per_parameter + way.buffers_per_parameter,
    )


def choices(
    model: ModelFacts,
    run: RunFacts,
    strategies: Sequence[Strategy],
    device: DeviceModel,
    world: World,
    efficiencies: tuple[Efficiency, Efficiency] = (FAST, SLOW),
    admits: Callable[[Choice], bool] = lambda choice: True,
    *,
    everything: bool = False,
) -> list[Choice]:
    """All ways that the formulas know and `admits` accepts, the best first.

    `efficiencies` are the ends of the range of times, the faster one first. Where nothing fits that keeps all on the devices,
    or with `everything`, frozen weights may be kept in less; with `everything` also in types that products are computed in. Of
    those that may keep a part of streamed weights on the device, there are what is configured and the most that fits. Raises
    UserError if no number of samples per rank keeps the effective batch.
    """
    strategies = [each for each in strategies if _can_update(each, run.of_way(each.options))]
    whole = [each for each in strategies if not each.divided]
    usable = whole if model.indivisible else strategies

    def ways(model: ModelFacts, strategies: Sequence[Strategy]) -> list[Choice]:
        found = (
            choice
            for strategy in strategies
            for recompute in strategy.recompute
            for micro in micro_batches(run.effective_batch, world.size // strategy.context)
            if micro * (world.size // strategy.context) == run.effective_batch
            or not run.of_way(strategy.options).releases_gradients
            for choice in _with_resident(model, run, strategy, recompute, micro, device, world, efficiencies)
        )
        return [each for each in found if admits(each)]

    found = ways(model, usable)
    if everything or all(each.fit.level != "fits" for each in found if not each.strategy.offloaded):
        for frozen in model.smaller:
            if everything or not frozen.multiplied:
                keeping = [each for each in usable if not each.divided or _can_shard(each, frozen)]
                found += ways(replace(model, frozen=frozen), [_with_frozen(each, frozen) for each in keeping])
    if all(run.effective_batch % (world.size // each.context) for each in usable):
        below = run.effective_batch // world.size * world.size
        near = " or ".join(str(each) for each in (below, below + world.size) if each)
        raise UserError(
            f"an effective batch of {run.effective_batch} cannot be divided over {world.size} ranks",
            fix=f"other --gpus, or train_batch_size x gradient_accumulation_steps x num_processes = {near}",
        )
    return in_order(found)


def _can_update(strategy: Strategy, run: RunFacts) -> bool:
    """Whether the optimizer can step the model's own parameters one after the other, if the run needs that."""
    if run.releases_gradients and strategy.keeps_gradients:
        return False
    return _steps_parameters(strategy) or not (run.releases_gradients or run.bf16_weights)


def _can_shard(strategy: Strategy, frozen: FrozenStorage) -> bool:
    return frozen.multiplied and _steps_parameters(strategy)


def _steps_parameters(strategy: Strategy) -> bool:
    """Whether the model has parameters of its own, which DeepSpeed replaces."""
    return strategy.options.get("deepspeed_config") is None


def _with_resident(
    model: ModelFacts,
    run: RunFacts,
    strategy: Strategy,
    recompute: Recompute,
    micro_batch: int,
    device: DeviceModel,
    world: World,
    efficiencies: tuple[Efficiency, Efficiency],
) -> Iterator[Choice]:
    """The way as it is proposed, and with as many blocks of streamed weights on the device as fit, if it may have some."""

    def with_gib(gib: float) -> Choice:
        own = replace(strategy, options={**strategy.options, _RESIDENT: gib})
        return estimate(model, run, own, recompute, micro_batch, device, world, efficiencies)

    yield estimate(model, run, strategy, recompute, micro_batch, device, world, efficiencies)
    if _RESIDENT not in strategy.options or "frozen" not in strategy.offloaded or "weights" in strategy.offloaded:
        return
    sizes = resident_sizes(model, strategy)
    fitting = bisect_left(sizes, x=True, key=lambda gib: with_gib(gib).fit.level != "fits")
    if fitting and sizes[fitting - 1] != strategy.options[_RESIDENT]:
        yield with_gib(sizes[fitting - 1])


def resident_sizes(model: ModelFacts, strategy: Strategy) -> list[float]:
    """Values of `resident_gib` with which 1, 2, ... blocks stay on the device, from the last one on; all but one at most."""
    frozen = [block.parameters - block.trained for block in model.sample.blocks]
    each = model.frozen.bytes / strategy.frozen / max(1, model.parameters - model.trained)
    return [math.ceil(size * each / 2**30 * 100) / 100 for size in accumulate(reversed(frozen[1:]))]


def _with_frozen(strategy: Strategy, frozen: FrozenStorage) -> Strategy:
    kept = " ".join(str(value) for value in frozen.options.values())
    options = {**strategy.options, **frozen.options}
    return replace(strategy, name=f"{strategy.name}-{kept}", title=f"{strategy.title}, {kept}", options=options)


def in_order(found: Iterable[Choice]) -> list[Choice]:
    """Those that fit by speed, then tight ones by speed, then the others by how much they lack; what would fail comes last."""
    return sorted(found, key=_rank)


def _rank(choice: Choice) -> tuple[int, float]:
    order = len(_ORDER) if choice.error is not None else _ORDER[choice.fit.level]
    return order, choice.fit.least if order == 2 else choice.seconds


def configured(found: Sequence[Choice], config: Config, plugin: str) -> Choice | None:
    """The way that the options of a configuration ask for; `plugin` is that of its strategy. None if it is not among them."""

    def differences(choice: Choice) -> tuple[bool, int, int]:
        other = {name for name in choice.options.keys() & config.schema.options if config.value(name) != choice.options[name]}
        recomputes = choice.strategy.recompute[choice.candidate.recompute]
        return not choice.strategy.is_configured, len(other & recomputes.keys()), len(other)

    of_plugin = [each for each in found if each.strategy.origin.plugin == plugin]
    nearest = min(of_plugin, key=differences, default=None)
    if nearest is None or nearest.candidate.micro_batch != config[DataOptions].train_batch_size:
        return None
    return nearest


def micro_batches(effective: int, data_ranks: int) -> Iterator[int]:
    """Samples per rank and micro-batch that divide each rank's share of the effective batch: 1, 2, 3, 4, 6, 8, ..."""
    if effective % data_ranks == 0:
        share = effective // data_ranks
        yield from (micro for micro in range(1, min(share, 64) + 1) if share % micro == 0)


def estimate(
    model: ModelFacts,
    run: RunFacts,
    strategy: Strategy,
    recompute: Recompute,
    micro_batch: int,
    device: DeviceModel,
    world: World,
    efficiencies: tuple[Efficiency, Efficiency] = (FAST, SLOW),
) -> Choice:
    """One way to train, by formulas."""
    data_ranks = world.size // strategy.context
    candidate = Candidate(
        strategy=strategy.origin.plugin,
        recompute=recompute,
        micro_batch=micro_batch,
        accumulation=run.effective_batch // (micro_batch * data_ranks),
        options={**strategy.options, **strategy.recompute[recompute]},
    )
    run = run.of_way(strategy.options).with_state(model)
    memory = memory_of(model, run, strategy, candidate, world.size)
    counted = Rehearsal(
        candidate=candidate,
        device=device.name,
        ranks=world.size,
        counted="formula",
        parameters=model.parameters,
        trainable=model.trained,
        width=model.sample.width,
        height=model.sample.height,
        text_tokens=model.sample.text_tokens,
        resident=memory.resident,
        resident_host=memory.resident_host,
        phases=memory.phases,
        traffic=tuple(_traffic(each, model, strategy, candidate) for each in strategy.communication),
        save_bytes=memory.phases["save"].pinned,
    )
    fastest, slowest = (time_of(model, run, strategy, candidate, device, world, each) for each in efficiencies)
    return Choice(
        strategy=strategy,
        candidate=candidate,
        world=world,
        counted=counted,
        fit=fit_of(counted, device, local_ranks=world.local_size),
        fastest=fastest,
        slowest=slowest,
        effective_batch=run.effective_batch,
    )


def _traffic(each: Communication, model: ModelFacts, strategy: Strategy, candidate: Candidate) -> Traffic:
    times = candidate.accumulation if each.times == "micro-batch" else 1
    return Traffic(
        collective=each.collective.replace("-", "_"),  # type: ignore[arg-type]
        ranks=each.ranks,
        bytes=int(sent_bytes(each, model, strategy, candidate)),
        calls=times * max(1, len(model.sample.blocks)),
    )
