"""Rehearse the few ways to train that matter, and judge them by what was counted. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from smalti import UserError
from smalti.config import Config
from smalti.parallel import DeviceModel
from smalti.plugins import Plugins
from smalti_plan.choices import Choice, in_order
from smalti_plan.fit import fit_of
from smalti_plan.records import Rehearsal
from smalti_plan.rehearsal.rehearse import rehearse

NOT_REHEARSED = "not rehearsed"
"""How a note begins that says why formulas count a way."""
_FEW = 3
"""Each takes half a minute of CPU for a model of 12 billion parameters."""


def worth_rehearsing(found: Sequence[Choice], own: Choice | None, most: int = _FEW) -> list[Choice]:
    """What is configured, and the best way of each of the first strategies that may fit."""
    firsts: dict[str, Choice] = {}
    for each in found:
        if each.fit.level != "does not fit":
            firsts.setdefault(each.strategy.name, each)
    chosen = list(firsts.values())[:most]
    return [*chosen, *([own] if own is not None and own not in chosen else [])]


def refined(
    found: Sequence[Choice],
    chosen: Sequence[Choice],
    config: Config,
    plugins: Plugins,
    device: DeviceModel,
    report: Callable[[str], object],
) -> dict[int, Choice]:
    """The chosen ways as a rehearsal counts them, by their place in `found`. `report` is called before each."""
    done = {}
    for number, choice in enumerate(chosen, 1):
        candidate = choice.candidate
        batch = f"{candidate.micro_batch}x{candidate.accumulation}"
        report(f"rehearsing {number} of {len(chosen)}: {choice.strategy.title}, recompute {candidate.recompute}, batch {batch}")
        done[found.index(choice)] = rehearsed(choice, config, plugins, device)
    return done


def replaced(found: Sequence[Choice], done: dict[int, Choice]) -> list[Choice]:
    """All ways with those that were rehearsed in place of their formulas, in order."""
    return in_order([done.get(number, each) for number, each in enumerate(found)])


def rehearsed(choice: Choice, config: Config, plugins: Plugins, device: DeviceModel) -> Choice:
    """The same way, counted by a rehearsal if that can be had."""
    size = choice.counted.width, choice.counted.height
    ranks, local = choice.world.size, choice.world.local_size
    try:
        counted = rehearse(config, plugins, device, choice.candidate, ranks=ranks, local=local, size=size)
    except (UserError, OSError) as error:
        return _by_formulas(choice, str(error))
    return judged(choice, counted, device)


def judged(choice: Choice, counted: Rehearsal, device: DeviceModel) -> Choice:
    """The same way with what a rehearsal has counted, or with the error by which the run refuses it.

    Any other exception may be of the rehearsal alone, such as a gap of fake tensors: formulas remain, with a note. So they do
    where torch's Python backend stands in for CUDA.
    """
    error = counted.error
    if error is None:
        return replace(choice, counted=counted, fit=fit_of(counted, device, local_ranks=choice.world.local_size))
    if not error.user:
        return _by_formulas(choice, f"in the {error.phase} ({error.where}): {error.message}")
    if device.kind == "cuda" and counted.guard == "python":
        return _by_formulas(choice, error.message.partition("\n")[0])
    return replace(choice, error=error)


def _by_formulas(choice: Choice, reason: str) -> Choice:
    note = f"{NOT_REHEARSED}: {choice.strategy.title}: {reason}"
    return replace(choice, counted=replace(choice.counted, notes=(*choice.counted.notes, note)))
