"""The fastest way to train that fits on the wanted GPUs, by the planner's formulas, and why it is that. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smalti import ConfigError, PreflightError, World
from smalti.config import Config, Schema, draft
from smalti.plugins import Plugins
from smalti_plan.choices import Choice, choices, strategies_for
from smalti_plan.counted import facts_of
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.presets.defaults import Line, Sections, effective_batch, resolutions, sections
from smalti_plan.presets.request import Request

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Planned:
    """`lines` of the file, and the way to train that they select. `steps` of the run."""

    request: Request
    lines: Sections
    choice: Choice
    steps: int
    notices: tuple[str, ...] = ()


def planned(request: Request, schema: Schema, plugins: Plugins, report: Callable[[str], None]) -> Planned:
    """At the model's own resolution if that fits, else at a smaller one.

    Raises PreflightError if no way to train fits, and ConfigError if the options of one that does are refused.
    """
    tight: list[tuple[int, list[Choice]]] = []
    best: Choice | None = None
    for resolution in resolutions(request):
        report(f"counting {request.entry.title} at {resolution} pixels")
        found = _ways(request, schema, plugins, resolution)
        best = min([*found, *([best] if best else [])], key=lambda each: each.fit.least)
        if found[0].fit.level == "fits":
            return _made(request, schema, found, resolution)
        if found[0].fit.level == "tight":
            tight.append((resolution, found))
    if tight:
        resolution, found = tight[-1]
        return _made(request, schema, found, resolution)
    assert best is not None, "there is at least one resolution"
    goal = "A LoRA of" if request.goal == "lora" else "Training all weights of"
    raise PreflightError(
        f"{goal} {request.entry.title} does not fit on {request.where}, with {request.device.memory / _GIB:.1f} GiB each: "
        f"the least that a way to train needs is {_range(best)} GiB ({best.strategy.title})",
        fix=f"{'--goal=lora, ' if request.goal == 'full' else ''}a smaller --model, more --gpus or a larger --card",
    )


def _ways(request: Request, schema: Schema, plugins: Plugins, resolution: int) -> list[Choice]:
    config = _config(schema, sections(request, schema, resolution, _launch(request), trained=0))
    world = World(size=request.gpus, local_size=request.gpus, device=request.device.kind)
    model = facts_of(config, plugins, request.device.kind)
    run = RunFacts.of(config, plugins, request.device.kind)
    return choices(model, run, strategies_for(config, plugins, world), request.device, world)


def _launch(request: Request) -> Mapping[str, Line]:
    """What is planned from: every GPU has one image, and accumulates the rest."""
    accumulation = effective_batch(request) // request.gpus
    return {"num_processes": Line(value=request.gpus), "gradient_accumulation_steps": Line(value=accumulation)}


def _config(schema: Schema, lines: Sections) -> Config:
    """Raises ConfigError with the problems of these lines."""
    words = []
    for name, line in ((name, line) for section in lines.values() for name, line in section.items()):
        values = line.value if isinstance(line.value, list) else [line.value]
        words += [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for value in values]
    config = draft(schema, words, environment={})
    if config.problems:
        raise ConfigError(config.problems)
    return config


def _made(request: Request, schema: Schema, found: Sequence[Choice], resolution: int) -> Planned:
    choice = found[0]
    launch = dict(_launch_lines(request, schema, choice, found))
    lines = sections(request, schema, resolution, launch, trained=choice.counted.trainable)
    steps = lines["Training"]["max_train_steps"].value
    assert isinstance(steps, int)
    notices = [*_config(schema, lines).notices]
    if choice.fit.level == "tight":
        notices.append(
            "the upper end of the planned memory is above that of the card, so the run may be out of memory: "
            "`smalti plan FILE --rehearse` counts closer"
        )
    if choice.fit.host > _GIB:
        notices.append(f"keeps about {choice.fit.host / _GIB:.0f} GiB in the memory of the node beside its usual needs")
    if "base_model_precision" in choice.strategy.options:
        notices.append("quantised weights need torchao: pip install 'torchao>=0.18'")
    return Planned(request=request, lines=lines, choice=choice, steps=steps, notices=tuple(notices))


def _launch_lines(request: Request, schema: Schema, choice: Choice, found: Sequence[Choice]) -> Iterator[tuple[str, Line]]:
    """The options of the chosen way that differ from their defaults; the reason stands at the first of those it holds for."""
    reasons = dict(_reasons(choice, found))
    always = {
        "num_processes": "GPUs",
        "train_batch_size": "images on each GPU at once",
        "gradient_accumulation_steps": f"images in each optimizer step over all GPUs: {choice.effective_batch}",
    }
    options = {name: choice.options[name] for name in always} | choice.options
    for name, value in options.items():
        if value is not None and (name in always or value != schema.options[name].default):
            yield name, Line(value=value, why=always.get(name) or reasons.get(name, ""))


def _reasons(choice: Choice, found: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    """Why each part of the choice was made, by option: what the best way without it would take."""
    strategy, recompute = choice.strategy, choice.candidate.recompute
    plain = [each for each in found if not each.strategy.divided and not each.strategy.offloaded]
    kept = [each for each in found if each.strategy.name == strategy.name and each.candidate.recompute == "none"]
    kept = kept or [each for each in plain if each.candidate.recompute == "none"]
    whole = [each for each in found if "base_model_precision" not in each.strategy.options]
    if "base_model_precision" in strategy.options:
        yield "base_model_precision", _instead("the frozen weights in less memory", "without at best", whole)
    for name in strategy.recompute[recompute] if recompute != "none" else ():
        yield name, _instead("computes activations again in the backward pass", "without", kept)
    parts = " and ".join(sorted(strategy.offloaded))
    if parts:
        for name in ("fsdp_cpu_offload", "stream_base"):
            yield name, f"{parts} in the memory of the node, {choice.fit.host / _GIB:.0f} GiB"
    for name in ("fsdp_enable", "deepspeed_config"):
        yield name, _instead(strategy.title, "without at best", plain)


def _instead(what: str, without: str, others: Sequence[Choice]) -> str:
    """`others` are in order, the best first."""
    if not others:
        return what
    first = others[0]
    return f"{what}; {without} {_range(first)} GiB: {'slower' if first.fit.level == 'fits' else first.fit.level}"


def _range(choice: Choice) -> str:
    return f"{choice.fit.least / _GIB:.1f} to {choice.fit.most / _GIB:.1f}"
