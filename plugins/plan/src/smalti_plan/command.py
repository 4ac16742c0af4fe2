"""`smalti plan`: which strategies fit on which devices, and how fast they would be, before anything is launched."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import click

from smalti import ExitCode, UserError, World
from smalti.cli import Command, CommandLine, print_table
from smalti.config import Config, LaunchOptions
from smalti.parallel import DeviceModel
from smalti.plugins import Plugins, choose_distributed
from smalti_plan.calibration import STEPS, Calibration, calibrate, calibration_of
from smalti_plan.choices import Choice, choices, configured, strategies_for
from smalti_plan.counted import facts_of
from smalti_plan.facts import ModelFacts
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.formulas.time import FAST, SLOW
from smalti_plan.here import named_device
from smalti_plan.refine import NOT_REHEARSED, refined, replaced, worth_rehearsing
from smalti_plan.report import RIGHT, TITLES, document, flags, parts, row

_SHOWN = 8
_MOST = 65_536
_LARGER = 4
"""Times the configured effective batch, or the number of devices, that is planned for where that cannot be divided."""


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[CONFIG] [--OPTION=VALUE]...",
    examples=(
        "smalti plan config.toml --gpu=h100-80g --gpus=8",
        "smalti plan config.toml --gpu=rtx4090 --model_type=lora",
        "smalti plan config.toml --gpu=a100-80g --gpus=1..64 --json",
    ),
)
@click.argument("arguments", metavar="", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--gpu",
    metavar="NAME",
    default="detected",
    help="A device of the table, or cpu. Default: this node's.",
)
@click.option("--gpus", metavar="N|MIN..MAX", default="", help="Number of devices. Default: --num_processes.")
@click.option("--nodes-of", metavar="N", default=8, show_default=True, help="Devices in each node.")
@click.option("--quick", is_flag=True, help="Stop after the formulas.")
@click.option("--rehearse", "as_it_is", is_flag=True, help="Rehearse the configuration as it is, and nothing else.")
@click.option("--measure", is_flag=True, help="Train thirteen real steps on this node first, to narrow the ranges of times.")
@click.option("--all", "everything", is_flag=True, help="Show all ways to train, not only the best.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    arguments: tuple[str, ...],
    gpu: str,
    gpus: str,
    nodes_of: int,
    quick: bool,
    as_it_is: bool,
    measure: bool,
    everything: bool,
    as_json: bool,
) -> int:
    """Say what fits, and what is fastest, on devices of this node or any other.

    CONFIG and options are those of `smalti train`; the effective batch is kept. Nothing is launched, and no weights are read.
    Formulas compare all ways to train. The best of them are rehearsed: their own code runs without values, for up to a
    minute each.
    """
    command_line = CommandLine.parse(list(arguments))
    config, plugins = command_line.config(), command_line.plugins
    sizes = _sizes(gpus, config[LaunchOptions].num_processes)
    configured_plan, ranks = choose_distributed(config, plugins), config[LaunchOptions].num_processes
    if ranks % configured_plan.context:
        reason = f"{ranks} ranks cannot be split into groups of {configured_plan.context} that share a sample"
        raise UserError(reason, fix=f"--num_processes={configured_plan.context * max(1, ranks // configured_plan.context)}")
    strategy = configured_plan.origin.plugin
    device = named_device(gpu, min(sizes[0], nodes_of))
    run = RunFacts.of(config, plugins, device.kind)
    model = facts_of(config, plugins, device.kind)
    if measure:
        _report(f"training {STEPS} steps as configured")
        found, _ = _compared(config, plugins, model, run, device, [run.ranks], nodes_of)
        calibrate(arguments, _own(found, run, config, strategy), model, run, device)
    calibration = calibration_of(device, run.products, min(sizes[0], nodes_of))
    found, notices = _compared(config, plugins, model, run, device, sizes, nodes_of, calibration)
    notices += configured_plan.notices
    if calibration is not None:
        notices.append(f"times were measured here: {calibration.seconds:.3g} s/step with {calibration.way}")
    for size, of_size in found.items():
        if not quick:
            own = configured(of_size, config, strategy) if size == run.ranks else None
            few = {} if len(found) == 1 else {"most": 1}
            chosen = [own] if as_it_is and own is not None else worth_rehearsing(of_size, own, **few)
            found[size] = replaced(of_size, refined(of_size, chosen, config, plugins, device, _report))
    own = configured(found.get(run.ranks, ()), config, strategy)
    notes = (note.partition("\n")[0] for ways in found.values() for way in ways for note in way.counted.notes)
    notices += sorted({note for note in notes if note.startswith(NOT_REHEARSED)})
    if as_json:
        click.echo(json.dumps(document(device, found, notices, own, calibration), indent=2))
    else:
        for size, of_size in found.items():
            _show(device, size, of_size, run, own if size == run.ranks else None, everything=everything)
        for notice in notices:
            click.echo(f"note: {notice}")
    fits = any(each.fit.level != "does not fit" and each.error is None for of_size in found.values() for each in of_size)
    return int(ExitCode.DONE if fits else ExitCode.PREFLIGHT)


def _own(found: dict[int, list[Choice]], run: RunFacts, config: Config, strategy: str) -> Choice:
    """The configured way. Raises UserError if it is not among those that can be planned."""
    own = configured(found.get(run.ranks, ()), config, strategy)
    if own is None:
        raise UserError(f"what is configured is not among the plans for {run.ranks} devices", fix=f"--gpus={run.ranks}")
    return own


def _report(sentence: str) -> None:
    click.echo(f"smalti: {sentence}", err=True)


def _compared(
    config: Config,
    plugins: Plugins,
    model: ModelFacts,
    run: RunFacts,
    device: DeviceModel,
    sizes: Sequence[int],
    nodes_of: int,
    calibration: Calibration | None = None,
) -> tuple[dict[int, list[Choice]], list[str]]:
    """All ways to train by formulas, by the number of devices, and notices. Raises UserError if there are none."""
    efficiencies = (FAST, SLOW) if calibration is None else calibration.efficiencies(device, run.products)
    found: dict[int, list[Choice]] = {}
    refused: list[UserError] = []

    def compare(run: RunFacts, size: int) -> list[Choice]:
        world = World(size=size, local_size=min(size, nodes_of), device=device.kind)
        return choices(model, run, strategies_for(config, plugins, world), device, world, efficiencies)

    for size in sizes:
        try:
            found[size] = compare(run, size)
        except UserError as error:
            refused.append(error)
    notices = [*run.notices, *(each.message for each in refused)]
    if not found:  # a configuration for fewer devices than it is planned for
        larger = replace(run, effective_batch=math.lcm(run.effective_batch, *sizes))
        if larger.effective_batch > max(sizes[-1], run.effective_batch) * _LARGER:
            raise refused[0]
        found = {size: compare(larger, size) for size in sizes}
        notices.append(f"planned for an effective batch of {larger.effective_batch} instead")
    sample = model.sample
    texts = f" and texts of {sample.text_tokens} tokens" if sample.text_tokens else ""
    notices.append(f"counted for {sample.width}x{sample.height} pixels{texts} ({sample.source}); times are ranges, to compare")
    return found, notices


def _show(
    device: DeviceModel, size: int, found: Sequence[Choice], run: RunFacts, own: Choice | None, *, everything: bool
) -> None:
    """The best ways on `size` devices, one of each strategy at least, and the one that is configured."""
    click.echo(f"\n{size} x {device.title}, effective batch {found[0].effective_batch}")
    shown = list(found) if everything else _best(found)
    if own is not None and own not in shown:
        shown = [each for each in found if each in shown or each is own]
    rows = [(*row(each), "<- as configured" if each is own else "") for each in shown]
    print_table((*TITLES, ""), rows, right=RIGHT, colours={"fits": "green", "does not fit": "red"})
    best = found[0]
    if own is not None and own is not best:
        ratio = best.samples_per_second / own.samples_per_second
        compared = f", about {ratio:.2g} times as many images per second" if best.fit.level != "does not fit" else ""
        click.echo(f"\nas configured: {own.strategy.title}, {own.fit.level}")
        for line in parts(own, device):
            click.echo(f"  {line}")
        click.echo(f"\nbest: {best.strategy.title}, {best.fit.level}{compared}")
    else:
        click.echo(f"\nbest: {best.strategy.title}, {best.fit.level}")
    for line in parts(best, device):
        click.echo(f"  {line}")
    click.echo(f"  flags: {flags(best.options)}")
    for each in shown:
        if each.error is not None:
            click.echo(
                f"\n{each.strategy.title} would fail in the {each.error.phase}: {each.error.message}\n  {each.error.where}"
            )


def _best(found: Sequence[Choice]) -> list[Choice]:
    """The best way of each strategy, in order; and more of those that fit, up to `_SHOWN`."""
    firsts = {each.strategy.name: each for each in reversed(found)}
    chosen = [each for each in found if firsts[each.strategy.name] is each or each.error is not None]
    more = [each for each in found if each not in chosen and each.fit.level == "fits"]
    kept = [*chosen, *more[: max(0, _SHOWN - len(chosen))]]
    return [each for each in found if each in kept]


def _sizes(text: str, configured: int) -> list[int]:
    """Numbers of devices: one, or the powers of two in a range with its ends. Raises UserError for anything else."""
    if not text:
        return [configured]
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= _MOST:
        raise UserError(f"--gpus={text} is not a number of devices", fix="--gpus=8, or --gpus=1..64")
    powers = [2**exponent for exponent in range(17) if least < 2**exponent < most]
    return [least, *powers, most] if most > least else [least]
