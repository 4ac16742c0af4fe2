"""What `--fit` chooses: against trying every way, and what rehearsals of its choices count; and the page of tables.

`python bench/fit.py --tables > docs/reference/memory.md` writes model x method x card, with the host memory of each. Nothing is
measured on a device: `smalti plan` counts. A rehearsal takes half a minute of CPU to two, and its answer is kept, so that the
command can be repeated; `--minutes=10` takes formulas for what was not rehearsed by then.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "bench"), str(ROOT / "plugins" / "plan" / "tests")]
from planning.excluded import EXCLUDED  # noqa: E402
from planning.exhaustive import exhaustive  # noqa: E402
from run import Result  # noqa: E402
from sizes import sized  # noqa: E402

from smalti import Recompute, UserError, World  # noqa: E402
from smalti.config import Config, draft  # noqa: E402
from smalti.parallel import DeviceModel  # noqa: E402
from smalti.plugins import Plugins, load_plugins, schema_of  # noqa: E402
from smalti_plan.choices import Choice, choices, strategies_for  # noqa: E402
from smalti_plan.counted import facts_of  # noqa: E402
from smalti_plan.facts import ModelFacts  # noqa: E402
from smalti_plan.fit import fit_of  # noqa: E402
from smalti_plan.formulas.run_facts import RunFacts  # noqa: E402
from smalti_plan.limit.search import Search, host_of, seconds_of  # noqa: E402
from smalti_plan.presets.request import card_of  # noqa: E402
from smalti_plan.refine import rehearsed  # noqa: E402

CARDS = (8, 12, 16, 24, 48, 80)
MODELS = ("sdxl", "flux", "qwen_image")
GOALS: Mapping[str, Mapping[str, object]] = {
    "lora": {"model_type": "lora", "lora_rank": 16},
    "full": {"model_type": "full"},
    "factored": {"model_type": "full", "optimizer": "adafactor", "max_grad_norm": 0},
}
"""What is trained, with the options of it. With the last one gradients may be released."""
BATCH = 4
"""Effective batch of the choices."""
HOST = 128 * 2**30
WORLD = World(size=1, local_size=1, device="cuda")
REHEARSED: Sequence[tuple[str, str, int]] = sized(
    (
        *(("sdxl", "lora", each) for each in (8, 12, 24, 48, 80)),
        *(("sdxl", "full", each) for each in (8, 12, 24, 48, 80)),
        *(("sdxl", "factored", each) for each in (8, 12, 24, 48)),
        *(("flux", "lora", each) for each in (8, 12, 16, 24)),
        ("flux", "factored", 48),
        ("qwen_image", "lora", 12),
    ),
    short=(),
)
"""Configurations whose choice is rehearsed."""
_GIB = 2**30
_TITLES = {"sdxl": "SDXL", "flux": "FLUX.1", "qwen_image": "Qwen-Image"}
_HEADINGS = {"lora": "LoRA", "full": "all weights", "factored": "all weights with Adafactor, no limit of the norm"}
_TRAINED = ("full", "factored")
"""Goals in which all weights train."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: a way by its strategy, precision of frozen weights and recomputation; of some goals, or of all."""

    title: str
    strategy: str
    recompute: Recompute = "full"
    precision: str = ""
    goals: Sequence[str] = tuple(GOALS)


METHODS = (
    Method(title="all on the GPU", strategy="single", recompute="none"),
    Method(title="recomputed", strategy="single"),
    Method(title="recomputed, int8 base", strategy="single", precision="int8-torchao", goals=("lora",)),
    Method(title="recomputed, nf4 base", strategy="single", precision="nf4-torchao", goals=("lora",)),
    Method(title="base streamed", strategy="streamed", goals=("lora",)),
    Method(title="base streamed, int8", strategy="streamed", precision="int8-torchao", goals=("lora",)),
    Method(title="recomputed, gradients released", strategy="single-released", goals=_TRAINED),
    Method(title="recomputed, weights in bf16", strategy="single-bf16", goals=_TRAINED),
    Method(title="recomputed, weights in bf16, gradients released", strategy="single-bf16-released", goals=_TRAINED),
    Method(title="FSDP2 offloaded, recomputed", strategy="fsdp2-offload"),
    Method(title="ZeRO 2, optimizer offloaded, recomputed", strategy="zero-2-offload", goals=_TRAINED),
)


def measure() -> list[Result]:
    return list(_measured())


def _measured() -> Iterator[Result]:
    """Seconds of a step by formula: of the choice, over those of the best way. Then the counted peak, over the limit."""
    plugins = load_plugins()
    for model, goal, card in sized([(m, g, c) for m in MODELS for g in GOALS for c in CARDS], short=[("sdxl", "lora", 12)]):
        search = searched(plugins, model, goal, card)
        best = exhaustive(search)
        try:
            chosen = search.best()
        except UserError:
            assert best is None, best
            continue
        if best is None:
            continue  # only such as may fit
        name = f"fit: {_TITLES[model]} {goal}, {card} GB"
        yield _result(f"{name}: step of the choice over that of the best of all", chosen.seconds, best.seconds, "s")
        if (model, goal, card) in REHEARSED:
            after = rehearsed(chosen, search.config, plugins, search.device)
            counted = after.counted
            assert counted.counted != "formula", after.error or counted.notes
            peak = max(each.device.total for each in counted.phases.values())
            yield _result(f"{name}: peak of the rehearsal over the limit", peak / _GIB, search.device.memory / _GIB, "GiB")


def _result(name: str, ours: float, peer: float, unit: str) -> Result:
    return Result(
        name=name, ratio=round(ours / peer, 4), ours=round(ours, 3), peer=round(peer, 3), unit=unit, goal=1.0, pairs=1
    )


def configuration(plugins: Plugins, model: str, goal: str) -> Config:
    """A run at 1024 pixels, of the sizes that are published; its weights and images are not there."""
    values = {
        "model_family": model,
        "instance_data_dir": "/nowhere/photos",
        "output_dir": "/nowhere/run",
        "resolution": 1024,
        "max_train_steps": 10,
        "mixed_precision": "bf16",
        **GOALS[goal],
    }
    config = draft(schema_of(plugins), [f"--{name}={value}" for name, value in values.items()], environment={})
    assert not config.problems, config.problems
    return config


def card(gigabytes: int) -> DeviceModel:
    """The slowest card of this size, with the size as its limit, as `--fit=12GB` has it."""
    return replace(card_of(f"{gigabytes}GB"), memory=gigabytes * 10**9)


def searched(plugins: Plugins, model: str, goal: str, gigabytes: int) -> Search:
    config = configuration(plugins, model, goal)
    run = replace(RunFacts.of(config, plugins, "cuda"), effective_batch=BATCH)
    return Search(
        config=config,
        plugins=plugins,
        model=facts_of(config, plugins, "cuda"),
        run=run,
        device=card(gigabytes),
        world=WORLD,
        host=HOST,
        fixed=frozenset(config.sources),
        is_complete=False,
    )


# --- the page -------------------------------------------------------------------------------------------------------


def page(until: float) -> str:
    plugins = load_plugins()
    lines = [
        "# Memory by model, method and card",
        "",
        "What fits on which card, as `smalti plan` counts it; nothing was measured on a GPU. One GPU, images of 1024 pixels,",
        "bf16, AdamW if nothing else is said, LoRA of rank 16; latents and texts are cached. This page is generated:",
        "`python bench/fit.py --tables > docs/reference/memory.md`.",
        "",
        "## Methods, one image at a time",
        "",
        "GiB that tensors need at the peak, and host memory of the node. A run fits on a card (yes), may fit (tight) or does",
        "not (no), with what CUDA and fragmentation take. Rows with * are counted by formula, the others by a rehearsal.",
        "Formulas leave out that images are encoded before, which takes 2.6 GiB for each of a micro-batch.",
    ]
    for model in MODELS:
        for goal in GOALS:
            lines += ["", f"### {_TITLES[model]}, {_HEADINGS[goal]}", ""]
            lines += _table(
                ("method", "peak", "host", *(f"{each} GB" for each in CARDS)), _methods(plugins, model, goal, until)
            )
    lines += [
        "",
        "## What `--fit` chooses",
        "",
        f"Predicted GiB at the peak with allowances, host memory and seconds of a step, for an effective batch of {BATCH} and",
        f"{HOST // _GIB} GiB of host memory, on the slowest card of that size in the planner's table.",
        "",
    ]
    rows = [
        (_TITLES[model], goal, *_chosen(plugins, model, goal, each)) for model in MODELS for goal in GOALS for each in CARDS
    ]
    lines += _table(("model", "goal", "card", "way", "recompute", "batch", "GiB", "host", "s a step"), rows)
    lines += ["", "## What excludes each other", "", "A launch refuses these pairs before anything starts.", ""]
    lines += _table(("feature", "with", "message"), [(*pair, f"... {said} ...") for pair, (_, said) in EXCLUDED.items()])
    return "\n".join(lines) + "\n"


def _methods(plugins: Plugins, model: str, goal: str, until: float) -> Iterator[tuple[str, ...]]:
    config = configuration(plugins, model, goal)
    facts, run = facts_of(config, plugins, "cuda"), RunFacts.of(config, plugins, "cuda")
    found = {(each.strategy.name, each.candidate.recompute): each for each in _all_ways(config, plugins, facts, run)}
    for method in METHODS:
        name = f"{method.strategy}-{method.precision}" if method.precision else method.strategy
        choice = found.get((name, method.recompute))
        if choice is None or goal not in method.goals:
            continue
        is_possible = time.monotonic() < until and not (method.precision and find_spec("torchao") is None)
        counted = rehearsed(choice, config, plugins, card(80)) if is_possible else choice
        if counted.error is not None:
            print(f"{model} {goal}: {method.title} is refused: {counted.error.message}", file=sys.stderr, flush=True)
            continue
        mark = "*" if counted.counted.counted == "formula" else ""
        peak = f"{counted.counted.peak.total / _GIB:.1f}{mark}"
        yield (method.title, peak, f"{host_of(counted) / _GIB:.0f}", *(_on(counted, each) for each in CARDS))


def _all_ways(config: Config, plugins: Plugins, facts: ModelFacts, run: RunFacts) -> list[Choice]:
    """All ways with one image, the quantised ones too, and none with resident blocks: as on a device of no memory."""
    tiny = replace(card(80), memory=1)
    return choices(facts, run, strategies_for(config, plugins, WORLD, combined=True), tiny, WORLD)


def _on(choice: Choice, gigabytes: int) -> str:
    return {"fits": "yes", "tight": "tight"}.get(fit_of(choice.counted, card(gigabytes), local_ranks=1).level, "no")


def _chosen(plugins: Plugins, model: str, goal: str, gigabytes: int) -> tuple[str, ...]:
    try:
        found = searched(plugins, model, goal, gigabytes).best()
    except UserError:
        return f"{gigabytes} GB", "nothing fits", "", "", "", "", ""
    candidate, fit = found.candidate, found.fit
    return (
        f"{gigabytes} GB",
        found.strategy.title,
        candidate.recompute,
        f"{candidate.micro_batch}x{candidate.accumulation}",
        f"{fit.least / _GIB:.1f}-{fit.most / _GIB:.1f}",
        f"{host_of(found) / _GIB:.0f}",
        "-".join(seconds_of(found)),
    )


def _table(titles: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (titles, ["---"] * len(titles), *rows)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", required=True)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="rehearse for N minutes, then use formulas"
    )
    sys.stdout.write(page(time.monotonic() + 60 * parser.parse_args().minutes))
