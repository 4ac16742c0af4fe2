"""The best way to train within limits of memory, by trying all of them: every number of resident blocks, every precision."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from smalti import Strategy
from smalti_plan.choices import Choice, estimate, resident_sizes, strategies_for
from smalti_plan.limit.search import Search, fits, host_of

ADDED = {"offload_activations": True, "release_gradients": True, "weights_dtype": "bf16"}
"""What may be added to any strategy where all weights train, as far as the checks of a launch accept it."""


def exhaustive(search: Search) -> Choice | None:
    """The fastest one that fits for sure; None if none does. Less precise weights count where nothing else fits so."""
    names = list(ADDED) if search.config.value("model_type") == "full" else ["offload_activations"]
    proposed = strategies_for(search.config, search.plugins, search.world)
    strategies = [way for each in proposed for way in _with_added(each, names)]
    found = list(_all(search, search.model, strategies))
    for frozen in search.model.smaller:
        stored = [
            replace(each, options={**each.options, **frozen.options})
            for each in strategies
            if not each.divided or (frozen.multiplied and "deepspeed_config" not in each.options)
        ]
        found += _all(search, replace(search.model, frozen=frozen), stored)
    within = [each for each in found if _fits(each, search) and host_of(each) <= search.host]
    within.sort(key=lambda each: (is_rounded(each), each.seconds))
    return next((each for each in within if not search.refused(each)), None)


def is_rounded(choice: Choice) -> bool:
    return "weights_dtype" in choice.options or "base_model_precision" in choice.options


def _with_added(strategy: Strategy, names: list[str]) -> Iterator[Strategy]:
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            waits = {"activations"} if "offload_activations" in chosen else set()
            added = {name: ADDED[name] for name in chosen}
            yield replace(strategy, options={**strategy.options, **added}, offloaded=strategy.offloaded | waits)


def _all(search, model, strategies):
    ranks = search.world.size
    for strategy in strategies:
        for micro in range(1, search.run.effective_batch // ranks + 1):
            if search.run.effective_batch % (micro * ranks):
                continue
            sizes = [0.0, *resident_sizes(model, strategy)] if strategy.options.get("stream_base") else [None]
            for gib in sizes:
                options = strategy.options if gib is None else {**strategy.options, "resident_gib": gib}
                way = replace(strategy, options=options)
                for recompute in strategy.recompute:
                    yield estimate(model, search.run, way, recompute, micro, search.device, search.world)


def _fits(choice, search):
    options = {name: value for name, value in choice.options.items() if name in search.fixed}
    is_within = choice.fit.level == "fits" and fits(choice, search.device, 2**60)
    return is_within and all(search.config.value(name) == value for name, value in options.items())
