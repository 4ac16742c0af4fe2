"""`smalti plan`: which strategies fit on which devices, and how fast they would be, before anything is launched."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import click

from smalti.cli.arguments import CommandLine
from smalti.cli.output import print_table
from smalti.cli.pages.help import Command
from smalti.errors import ExitCode, UserError
from smalti.hookspecs import HookSpecs
from smalti.parallel import DeviceModel, device_model_of, device_models
from smalti.planning import (
    RIGHT,
    TITLES,
    Choice,
    RunFacts,
    choices,
    configured,
    document,
    facts_of,
    flags,
    parts,
    row,
)
from smalti.plugins import choose_distributed
from smalti.types import World

_SHOWN = 8
_MOST = 65_536
_DETECT = """
import torch
device = torch.accelerator.current_accelerator(check_available=True)
print("" if device is None else torch.cuda.get_device_name(0) if device.type == "cuda" else device.type)
"""


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
@click.option("--gpu", metavar="NAME", default="detected", help="The device: one of the table, or the one of this machine.")
@click.option("--gpus", metavar="N|MIN..MAX", default="", help="Number of devices. Default: --num_processes.")
@click.option("--nodes-of", metavar="N", default=8, show_default=True, help="Devices in each node.")
@click.option("--all", "everything", is_flag=True, help="Show all ways to train, not only the best.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(arguments: tuple[str, ...], gpu: str, gpus: str, nodes_of: int, everything: bool, as_json: bool) -> int:
    """Say what fits, and what is fastest, on devices that need not be there.

    CONFIG and options are those of `smalti train`; the effective batch is kept. Nothing is launched, and no weights are read.
    """
    command_line = CommandLine.parse(list(arguments))
    config, plugins = command_line.draft(), command_line.plugins
    device = _device(gpu)
    optimizers = plugins.gather(HookSpecs.register_optimizers)
    run = RunFacts.of(config, optimizers, device.kind)
    sizes = _sizes(gpus, run.ranks)
    model = facts_of(config, plugins, device.kind)
    found: dict[int, list[Choice]] = {}
    refused: list[UserError] = []
    for size in sizes:
        world = World(size=size, local_size=min(size, nodes_of), device=f"{device.kind}:0")
        strategies = plugins.gather(HookSpecs.propose_strategies, config=config, world=world)
        try:
            found[size] = choices(model, run, strategies, device, world)
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    notices = [*run.notices, *(each.message for each in refused)]
    notices.append(f"formulas for {model.sample.width}x{model.sample.height} pixels; times are ranges, to compare")
    own = configured(found.get(run.ranks, ()), config, choose_distributed(config, plugins).origin.plugin)
    if as_json:
        click.echo(json.dumps(document(device, found, notices, own), indent=2))
    else:
        for size, of_size in found.items():
            _show(device, size, of_size, run, own if size == run.ranks else None, everything=everything)
        for notice in notices:
            click.echo(f"note: {notice}")
    fits = any(each.verdict.fit != "does not fit" for of_size in found.values() for each in of_size)
    return int(ExitCode.DONE if fits else ExitCode.PREFLIGHT)


def _show(
    device: DeviceModel, size: int, found: Sequence[Choice], run: RunFacts, own: Choice | None, *, everything: bool
) -> None:
    """The best ways on `size` devices, one of each strategy at least, and the one that is configured."""
    click.echo(f"\n{size} x {device.title}, effective batch {run.effective_batch}")
    shown = list(found) if everything else _best(found)
    if own is not None and own not in shown:
        shown = [each for each in found if each in shown or each is own]
    rows = [(*row(each), "<- as configured" if each is own else "") for each in shown]
    print_table((*TITLES, ""), rows, right=RIGHT, colours={"fits": "green", "does not fit": "red"})
    best = found[0]
    if own is not None and own is not best:
        ratio = best.samples_per_second / own.samples_per_second
        compared = f", about {ratio:.2g} times as many images per second" if best.verdict.fit != "does not fit" else ""
        click.echo(f"\nas configured: {own.strategy.title}, {own.verdict.fit}")
        for line in parts(own):
            click.echo(f"  {line}")
        click.echo(f"\nbest: {best.strategy.title}, {best.verdict.fit}{compared}")
    else:
        click.echo(f"\nbest: {best.strategy.title}, {best.verdict.fit}")
    for line in parts(best):
        click.echo(f"  {line}")
    click.echo(f"  flags: {flags(best.options)}")


def _best(found: Sequence[Choice]) -> list[Choice]:
    """The best way of each strategy, in order; and more of those that fit, up to `_SHOWN`."""
    firsts = {each.strategy.name: each for each in reversed(found)}
    chosen = [each for each in found if firsts[each.strategy.name] is each]
    more = [each for each in found if each not in chosen and each.verdict.fit == "fits"]
    kept = [*chosen, *more[: max(0, _SHOWN - len(chosen))]]
    return [each for each in found if each in kept]


def _device(name: str) -> DeviceModel:
    """The device of this name in the table, or that of this machine. Raises UserError with the known names."""
    known = device_models()
    if name == "detected":
        detected = _detected()
        if detected and (model := device_model_of(detected)):
            return model
        what = f"{detected} is not in the table" if detected else "this machine has no accelerator"
        raise UserError(f"{what}, and no device is named", fix=f"--gpu=NAME: {', '.join(known)}")
    if name not in known:
        raise UserError(f"the device {name!r} is unknown", fix=f"--gpu=NAME: {', '.join(known)}")
    return known[name]


def _detected() -> str:
    """The name of this machine's first accelerator, found out in another process; "" for none."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True, timeout=120)
    return done.stdout.strip()


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
