"""`smalti health`: GPUs now, faults of a run, and what the policy decides about a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from smalti.cli import Command, Group, counted, print_table
from smalti_health.options import HealthOptions
from smalti_health.policy.limits import Limits

_COLOURS = {"ok": "green", "warn": "yellow", "stop_saved": "red", "stop_suspect": "red", "stop_now": "red", "open": "red"}
_RUN = click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_LIMITS = (
    "gpu_health_ecc_errors",
    "gpu_health_temperature_margin",
    "gpu_health_temperature_seconds",
    "gpu_health_slowdown_share",
    "gpu_health_slowdown_clock",
)


def _limits(command: Callable[..., None]) -> Callable[..., None]:
    """The thresholds as options, with the names that they have in training."""

    def with_limits(**values: Any) -> None:
        given = {name: values.pop(name) for name in _LIMITS}
        command(limits=HealthOptions(**given).limits(), **values)

    for name in reversed(_LIMITS):
        field = HealthOptions.model_fields[name]
        default, text = field.default, "As in training."
        with_limits = click.option(f"--{name}", name, type=type(default), default=default, show_default=True, help=text)(
            with_limits
        )
    with_limits.__doc__ = command.__doc__
    return with_limits


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=("smalti health", "smalti health show runs/first", "smalti health replay runs/first"),
)
@_JSON
@click.pass_context
def health(context: click.Context, as_json: bool) -> None:
    """Health of the GPUs of this node, and of those of runs.

    Without a command it reads all GPUs once, and exits with 1 if one of them would stop a run.
    """
    if context.invoked_subcommand is not None:
        return
    from smalti_health.cli.now import read_now

    found = read_now(Limits())
    if as_json:
        click.echo(json.dumps([each.described() for each in found], indent=2))
    else:
        rows = [each.row() for each in found]
        print_table(("gpu", "name", "°C", "memory", "ECC errors", "health", ""), rows, right=(2, 3, 4), colours=_COLOURS)
    context.exit(1 if any(each.stops for each in found) else 0)


@health.command("show", cls=Command, examples=("smalti health show runs/first",))
@_RUN
@_JSON
def show(run_dir: Path, as_json: bool) -> None:
    """The circuit of each node of a run: the faults of GPUs that ended it there."""
    from smalti_health import circuit_state

    found = circuit_state(run_dir).nodes
    if as_json:
        click.echo(json.dumps([{"node": node, **asdict(circuit)} for node, circuit in found.items()], indent=2))
        return
    if not found:
        click.echo("no fault of a GPU has ended this run")
    rows = [
        (str(node), circuit.state, fault.kind, str(fault.step), fault.host, fault.message)
        for node, circuit in found.items()
        for fault in circuit.faults
    ]
    if rows:
        print_table(("node", "circuit", "fault", "step", "host", ""), rows, right=(0, 3), colours=_COLOURS)


@health.command("reset", cls=Command, examples=("smalti health reset runs/first",))
@_RUN
@_JSON
def reset(run_dir: Path, as_json: bool) -> None:
    """Let a run start again on nodes where faults without progress have ended it three times."""
    from smalti_health.circuits import reset_circuits

    nodes = reset_circuits(run_dir)
    click.echo(json.dumps({"nodes": nodes}) if as_json else f"reset on {counted(len(nodes), 'node')}")


@health.command(
    "replay",
    cls=Command,
    examples=("smalti health replay runs/first", "smalti health replay health.node-0.jsonl --gpu_health_temperature_margin=5"),
)
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@_JSON
@_limits
def replay(trace: Path, limits: Limits, as_json: bool) -> None:
    """What the policy decides about the readings of TRACE, a file or a run directory, with these thresholds."""
    from smalti_health.cli.replay import replayed

    found, count = replayed(trace, limits)
    if as_json:
        click.echo(json.dumps({"readings": count, "decisions": found}, indent=2))
        return
    rows = [tuple(str(each[name]) for name in ("time", "gpu", "decision", "kind", "message")) for each in found]
    if rows:
        print_table(("time", "gpu", "decision", "kind", ""), rows, right=(1,), colours=_COLOURS)
    click.echo(f"{counted(count, 'reading')}, {counted(len(found), 'decision')}")
