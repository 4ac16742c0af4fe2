"""Which ways are rehearsed, and what becomes of them in the order."""

from dataclasses import replace

from smalti import World
from smalti_plan.choices import choices
from smalti_plan.records import MemoryParts, PhasePeak, RehearsalError
from smalti_plan.refine import NOT_REHEARSED, judged, replaced, worth_rehearsing
from support.planned import H100, MODEL, RUN, WHOLE, sharded

WORLD = World(size=8, local_size=8, device="cuda")


def found(*strategies, gib=400):
    return choices(MODEL, RUN, strategies, replace(H100, memory=gib * 2**30), WORLD)


def test_the_best_way_of_each_strategy_and_the_configured_one_are_rehearsed_once():
    ways = found(WHOLE, sharded(8))
    own = next(each for each in ways if each.candidate.recompute == "full" and each.strategy is WHOLE)
    chosen = worth_rehearsing(ways, own)
    assert {each.strategy.name for each in chosen} == {"whole", "sharded"}
    assert (own in chosen, ways[0] in chosen, len(chosen)) == (True, True, 3)
    assert worth_rehearsing(ways, ways[0]) == [each for each in chosen if each is not own]


def test_what_cannot_fit_is_left_to_the_formulas():
    assert worth_rehearsing(found(WHOLE, sharded(8), gib=1), None) == []


def test_what_a_rehearsal_counts_changes_the_order_and_what_fails_comes_last():
    ways = found(WHOLE, sharded(8))
    peak = {"backward": PhasePeak(device=MemoryParts(parameters=2**50))}
    too_large = replace(ways[0], fit=replace(ways[0].fit, level="does not fit"), counted=replace(ways[0].counted, phases=peak))
    failing = replace(ways[1], error=RehearsalError(message="no"))
    ordered = replaced(ways, {0: too_large, 1: failing})
    assert ordered[-1] is failing
    assert ordered.index(too_large) > max(
        number for number, each in enumerate(ordered) if each.fit.level == "fits" and not each.error
    )
    assert len(ordered) == len(ways)


def test_what_a_run_refuses_fails_and_what_only_its_rehearsal_cannot_do_stays_with_the_formulas():
    way = found(WHOLE)[0]

    def after(**error):
        counted = replace(way.counted, guard="extension", error=RehearsalError(phase="step", where="model.py:3", **error))
        return judged(way, counted, H100)

    refused = after(message="no room", user=True)
    assert (refused.error.message, refused.counted) == ("no room", way.counted)
    gap = after(message="NotImplementedError: no kernel\nand more")
    assert (gap.error, gap.counted.counted, gap.fit) == (None, "formula", way.fit)
    assert gap.counted.notes[-1].startswith(
        f"{NOT_REHEARSED}: {way.strategy.title}: in the step (model.py:3): NotImplementedError"
    )
