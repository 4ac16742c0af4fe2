"""The best way to train within limits of memory, by trying all of them: every number of resident blocks, every precision."""

from dataclasses import replace

from smalti_plan.choices import Choice, estimate, resident_sizes, strategies_for
from smalti_plan.limit.search import Search, fits, host_of


def exhaustive(search: Search) -> Choice | None:
    """The fastest one that fits for sure; None if none does. Less precise weights count where nothing else fits there."""
    strategies = strategies_for(search.config, search.plugins, search.world)
    whole = [each for each in strategies if not each.divided]
    fitting = [each for each in _all(search, search.model, strategies) if _fits(each, search)]
    if all(each.strategy.offloaded for each in fitting if each.fit.level == "fits"):
        for frozen in search.model.smaller:
            stored = [replace(each, options={**each.options, **frozen.options}) for each in whole]
            fitting += [each for each in _all(search, replace(search.model, frozen=frozen), stored) if _fits(each, search)]
    within = (each for each in sorted(fitting, key=lambda each: each.seconds) if host_of(each) <= search.host)
    return next((each for each in within if not search.refused(each)), None)


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
