"""`smalti doctor --nodes`: the nodes of a launch, checked against each other. Runs on every node, like `smalti train`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from smalti import ConfigError, ExitCode, Finding, InvalidOptionError, PreflightError, UserError
from smalti.cli import Command, CommandLine, counted, print_table
from smalti.config import Config, LaunchOptions, RunOptions
from smalti.launch import DEFAULT_PORT
from smalti.plugins import Plugins
from smalti_cluster.checks.agent import Actions, Agent, Identity
from smalti_cluster.checks.checks import check_nodes
from smalti_cluster.checks.hosts import SSH, check_hosts
from smalti_cluster.checks.preflight import Notice, facts_of, finding_lines, identity, read_report
from smalti_cluster.checks.report import NodesReport
from smalti_cluster.checks.service import Service, gather_nodes
from smalti_cluster.checks.speed import device_facts, measure_devices
from smalti_cluster.options import ClusterOptions

_COLOURS = {"ok": "green"}


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[CONFIG] [--OPTION=VALUE]...",
    examples=("smalti nodes config.toml --num_machines=4", "smalti nodes --hosts=a,b,c --output_dir=/shared/run"),
)
@click.argument("arguments", metavar="", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--measure", is_flag=True, help="Measure the devices of all nodes too.")
@click.option("--hosts", metavar="A,B,C", help="The hosts, on which it is started over ssh.")
@click.option("--ssh_command", metavar="COMMAND", default=SSH, show_default=True, help="The ssh command of --hosts.")
def nodes(arguments: tuple[str, ...], as_json: bool, measure: bool, hosts: str | None, ssh_command: str) -> int:
    """Check several nodes against each other: start it on all of them, or with --hosts.

    Takes the same arguments as `smalti train`.
    """
    if hosts is not None:
        return check_hosts(hosts.split(","), arguments, ssh=ssh_command, as_json=as_json, measure=measure)
    return check_this_node(arguments, as_json=as_json, measure=measure)


def check_this_node(words: Sequence[str], *, as_json: bool, measure: bool) -> int:
    """Take part in the checks with the arguments of `smalti train`. Node 0 prints the report. Returns the exit code."""
    command_line = CommandLine.parse(words)
    config = command_line.draft()
    options, seconds, output_dir = _options(config)
    actions = _actions(config, command_line.plugins, options, output_dir)
    if options.machine_rank > 0:
        return _take_part(identity(config), options, actions, seconds)
    return _check(identity(config), options, actions, output_dir, seconds, as_json=as_json, measure=measure)


def _options(config: Config) -> tuple[LaunchOptions, int, Path]:
    """What the checks need, and how long nodes wait. Raises UserError if it is missing, ConfigError if it is not valid."""
    try:
        options, output_dir = config[LaunchOptions], config[RunOptions].output_dir
        seconds = config[ClusterOptions].rendezvous_timeout
    except InvalidOptionError:
        raise ConfigError(config.problems) from None
    if options.num_machines < 2 or not options.main_process_ip:
        raise UserError(
            "--nodes compares several nodes, and needs to know how many there are and where node 0 is",
            fix="give the arguments of `smalti train` on each node: --num_machines, --machine_rank and --main_process_ip; "
            "or start it on all of them with --hosts=a,b,c",
        )
    if not options.machine_rank < options.num_machines:
        message = f"machine_rank={options.machine_rank} does not exist with num_machines={options.num_machines}"
        raise UserError(message, fix="nodes are counted from 0")
    if output_dir is None:
        raise UserError("the nodes are to share a directory, and none is given", fix="--output_dir=FOLDER")
    return options, seconds, output_dir


def _actions(config: Config, plugins: Plugins, options: LaunchOptions, output_dir: Path) -> Actions:
    facts = device_facts(use_cpu=options.use_cpu)
    count = facts["count"]
    assert isinstance(count, int)
    return Actions(
        output_dir=output_dir,
        folder=output_dir if options.shared_output_dir else None,
        facts=facts_of(config, plugins, lambda: facts),
        measure=lambda seconds: measure_devices(count, seconds),
    )


# --- node 0 ---------------------------------------------------------------------------------------------------------


def _check(
    own: Identity,
    options: LaunchOptions,
    actions: Actions,
    output_dir: Path,
    seconds: int,
    *,
    as_json: bool,
    measure: bool,
) -> int:
    made = [each for each in (output_dir, *output_dir.parents) if not each.exists()]
    port = options.main_process_port or DEFAULT_PORT
    try:
        service = Service(own, actions, address=str(options.main_process_ip), port=port)
    except OSError as error:
        message = f"cannot write to {output_dir}: {error.strerror or error}"
        raise UserError(message, fix="choose another --output_dir") from error
    try:
        last = read_report(output_dir)
        missing = gather_nodes(service, seconds, _notice(service, seconds, last))
        report = check_nodes(service, bandwidth=True, devices=measure, last=last, progress=_print)
        report = _with_missing(report, missing, refused=bool(service.problems()), seconds=seconds)
        errors = [line for finding in report.of_level("error") for line in finding_lines(finding)]
        service.end({"errors": errors})
    finally:
        service.close()
        for folder in made:
            if not any(folder.iterdir()):
                folder.rmdir()
    code = ExitCode.DONE if report.works else ExitCode.PREFLIGHT
    if as_json:
        click.echo(json.dumps({**report.as_json(), "exit_code": int(code)}, indent=2))
    else:
        _print_report(report)
    return int(code)


def _with_missing(report: NodesReport, missing: list[int], *, refused: bool, seconds: int) -> NodesReport:
    if not missing or refused:
        return report
    found = [
        Finding(
            check="nodes",
            level="error",
            message=f"node {rank} did not connect within {seconds} s",
            fix=f"start the same command there with --machine_rank={rank}; --rendezvous_timeout waits longer",
        )
        for rank in missing
    ]
    return replace(report, findings=(*report.findings, *found))


def _notice(service: Service, seconds: int, last: NodesReport | None) -> Callable[[float, list[int]], None]:
    """Prints which nodes are missing, after a few seconds and then every half minute."""
    notice = Notice()
    hosts = dict(last.nodes) if last is not None else {}

    def say(waited: float, missing: list[int]) -> None:
        names = ", ".join(f"node {rank}{f' ({hosts[rank]})' if rank in hosts else ''}" for rank in missing)
        here = ", ".join(member.identity.name for member in service.members().values())
        notice.print(waited, f"waiting for {names}, for {waited:.0f} of {seconds} s; present: {here}")

    return say


def _print_report(report: NodesReport) -> None:
    titles, rows = report.table()
    print_table(titles, rows, colours=_COLOURS)
    for finding in (*report.of_level("error"), *report.of_level("warning"), *report.of_level("note")):
        click.echo("\n".join(finding_lines(finding)))
    errors, warnings = len(report.of_level("error")), len(report.of_level("warning"))
    click.echo(f"{counted(len(report.nodes), 'node')}: {counted(errors, 'error')}, {counted(warnings, 'warning')}")


# --- the others -----------------------------------------------------------------------------------------------------


def _take_part(own: Identity, options: LaunchOptions, actions: Actions, seconds: int) -> int:
    port = options.main_process_port or DEFAULT_PORT
    agent = Agent(own, actions, str(options.main_process_ip), port)
    where, notice = f"node 0 at {options.main_process_ip}, port {port}", Notice()
    try:
        while not agent.done:
            unreachable = agent.unreachable
            waited = time.monotonic() - unreachable[1] if unreachable is not None else 0.0
            if unreachable is not None and waited > seconds:
                raise PreflightError(
                    f"cannot connect to {where}: {unreachable[0]}",
                    fix="start the same command there with --machine_rank=0, and allow TCP to that port",
                )
            if unreachable is not None:
                notice.print(waited, f"waiting for {where}, for {waited:.0f} of {seconds} s: {unreachable[0]}")
            time.sleep(0.1)
    finally:
        agent.close()
    if agent.failure is not None:
        raise agent.failure
    if agent.refused is not None:
        refused = agent.refused["refused"]
        assert isinstance(refused, dict)
        raise PreflightError(str(refused["message"]), fix=str(refused["fix"]))
    errors = (agent.ended or {}).get("errors")
    for line in errors if isinstance(errors, list) else ():
        _print(str(line))
    return int(ExitCode.PREFLIGHT if errors else ExitCode.DONE)


def _print(text: str) -> None:
    click.echo(f"smalti: {text}", err=True)
