"""The preflight of a launch over several nodes: they are checked against each other before any of them starts a rank.

Node 0 listens on `--main_process_port` from the moment it has the run directory. The others connect as soon as they start, and
execute what node 0 requests. So a node that has another directory under the same name is found although its files are not.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import cast

import click

from smalti import Finding, InvalidOptionError, PreflightError, UserError
from smalti.config import Config, LaunchOptions
from smalti.launch import DEFAULT_PORT
from smalti.plugins import Plugins
from smalti.rundir import PREFLIGHT_REPORT, EventWriter
from smalti.system import load_json, read_regular, write_json_atomically
from smalti_cluster.checks.agent import Actions, Agent, Identity
from smalti_cluster.checks.channel import Message
from smalti_cluster.checks.checks import check_nodes
from smalti_cluster.checks.facts import node_facts
from smalti_cluster.checks.report import NodesReport
from smalti_cluster.checks.service import Service
from smalti_cluster.checks.speed import measure_devices
from smalti_cluster.nodes.network import route_to
from smalti_cluster.options import ClusterOptions, node_range

SAY_SECONDS = 5.0
"""A wait that is longer is printed."""
REPEAT_SECONDS = 30.0
"""A wait is printed again after this long."""
_POLL_SECONDS = 0.1
_UNREACHABLE_SECONDS = 15.0
"""A node whose files node 0 sees, but which cannot connect for this long, does not start."""


def facts_of(config: Config, plugins: Plugins, devices: Callable[[], Message]) -> Callable[[], Message]:
    """What gathers the facts of this node, for a configuration that may be a draft."""
    options = config[LaunchOptions]

    def gather() -> Message:
        interface = ("", "")
        with suppress(OSError):
            route = route_to(options.main_process_ip or "")
            interface = (route.name, route.address)
        return node_facts(
            values=_values(config),
            plugins=list(plugins.versions),
            devices=devices(),
            interface=interface,
            data=_local_data(config, plugins),
        )

    return gather


def identity(config: Config) -> Identity:
    return Identity(
        machine_rank=config[LaunchOptions].machine_rank,
        num_machines=node_range(config)[1],
        host=socket.gethostname(),
        version=version("smalti"),
    )


class Notice:
    """Prints for what is waited: once after a few seconds, then every half minute."""

    def __init__(self) -> None:
        self._next = SAY_SECONDS

    def print(self, waited: float, sentence: str) -> None:
        if waited >= self._next:
            self._next = waited - waited % REPEAT_SECONDS + REPEAT_SECONDS
            _print(sentence)


def check_separate_nodes(directory: Path, config: Config, plugins: Plugins, kind: str, events: EventWriter | None) -> None:
    """The preflight of nodes that do not share the run directory; each of them calls it. `directory` is that of this node.

    Raises PreflightError if the nodes could not train together, or if they do not find each other in time.
    """
    options = config[LaunchOptions]
    if options.num_machines == 1 or options.shared_output_dir or config[ClusterOptions].preflight == "off":
        return
    checks = NodeChecks(directory, config, plugins, kind)
    try:
        checks.gather(events) if options.machine_rank == 0 else checks.take_part()
    finally:
        checks.close()


class NodeChecks:
    """The checks of a launch, as seen by this node."""

    def __init__(self, directory: Path, config: Config, plugins: Plugins, kind: str) -> None:
        self._options = options = config[LaunchOptions]
        self._cluster, self._count = config[ClusterOptions], node_range(config)[1]
        self._directory = directory
        self._folder = directory / "nodes" if options.shared_output_dir else None
        self._port = options.main_process_port or DEFAULT_PORT
        self._own = identity(config)
        self._actions = Actions(
            output_dir=directory,
            folder=self._folder,
            facts=facts_of(config, plugins, lambda: _devices(kind)),
            measure=lambda seconds: measure_devices(cast(int, _devices(kind)["count"]), seconds),
        )
        self._agent: Agent | None = None
        self._service: Service | None = None

    @property
    def _active(self) -> bool:
        return self._cluster.preflight != "off"

    # --- node 0 -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept the other nodes from now on. Raises PreflightError if the port is in use."""
        if self._active:
            for abandoned in (self._directory / "nodes").glob(".nodes-*"):  # of a launch that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            address = self._options.main_process_ip or "127.0.0.1"
            self._service = Service(self._own, self._actions, address=address, port=self._port)

    def connected(self) -> set[int]:
        """The nodes that take part. Raises PreflightError if a node was refused that has connected."""
        if self._service is None:
            return set(range(self._count))
        if problems := self._service.problems():
            self._end(problems)
            raise failure(problems)
        return {rank for rank, member in self._service.members().items() if member.channel.is_open()}

    def run(self, events: EventWriter | None) -> None:
        """Check the nodes that have connected, and let them start.

        The report is kept in the run directory and in the events. Raises PreflightError if training could not work.
        """
        if self._service is None:
            return
        path, full = self._directory / PREFLIGHT_REPORT, self._cluster.preflight == "full"
        last = read_report(self._directory)
        report = check_nodes(self._service, bandwidth=full, devices=full, last=last, progress=_print)
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_json_atomically(path, report.as_json())
        if events is not None:
            message = f"preflight of {len(report.nodes)} nodes: {summary(report)}"
            events.append("log" if report.works else "warning", message=message, preflight=report.as_json())
        for line in (line for finding in report.of_level("warning") for line in finding_lines(finding)):
            _print(line)
        self._end(report.of_level("error"))
        if not report.works:
            raise failure(report.of_level("error"))
        _print(f"preflight: {summary(report)}")

    def gather(self, events: EventWriter | None) -> None:
        """Wait until all nodes have connected, then `run`. Only where nothing else is known about them."""
        self.listen()
        seconds, notice, begun = self._cluster.rendezvous_timeout, Notice(), time.monotonic()
        while missing := sorted(set(range(self._options.num_machines)) - self.connected()):
            names, waited = ", ".join(f"node {rank}" for rank in missing), time.monotonic() - begun
            if waited > seconds:
                fix = f"start the same command there with --machine_rank={missing[0]}; --rendezvous_timeout waits longer"
                error = Finding(check="nodes", level="error", message=f"{names} did not start within {seconds} s", fix=fix)
                self._end([error])
                raise failure([error])
            notice.print(waited, f"waiting for {names}, for {waited:.0f} of {seconds} s")
            time.sleep(_POLL_SECONDS)
        self.run(events)

    def _end(self, errors: list[Finding]) -> None:
        assert self._service is not None
        self._service.end({"errors": [[each.message, each.fix] for each in errors]})
        self._service = None

    # --- the others -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to node 0, from now on, in a thread."""
        if self._active and self._agent is None:
            self._agent = Agent(self._own, self._actions, self._options.main_process_ip or "", self._port)

    def take_part(self) -> None:
        """Connect to node 0 and wait until it lets this node start. Only where nothing else is known about it."""
        self.connect()
        seconds, notice, begun = self._cluster.rendezvous_timeout, Notice(), time.monotonic()
        assert self._agent is not None
        while self._agent.ended is None:
            self.raise_failure()
            if (error := self.unreachable(begun, seconds)) is not None:
                raise error
            waited = time.monotonic() - begun
            notice.print(waited, f"waiting for node 0 at {self._options.main_process_ip}, for {waited:.0f} s")
            time.sleep(_POLL_SECONDS)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises PreflightError if node 0 has refused this node, or the checks have failed."""
        if self._agent is None:
            return
        if self._agent.failure is not None:
            raise self._agent.failure
        if (refused := self._agent.refused) is not None:
            given = refused["refused"]
            assert isinstance(given, Mapping)
            raise PreflightError(str(given["message"]), fix=str(given["fix"]))
        errors = (self._agent.ended or {}).get("errors")
        if isinstance(errors, list) and errors:
            found = [Finding(check="", level="error", message=message, fix=fix) for message, fix in errors]
            raise failure(found)

    def unreachable(self, since: float, seconds: float | None = None) -> PreflightError | None:
        """Why this node cannot connect to node 0; None if it can. Node 0 listens `since` this time of the monotonic clock."""
        if self._agent is None or (reason := self._agent.unreachable) is None:
            return None
        if time.monotonic() - max(since, reason[1]) < (_UNREACHABLE_SECONDS if seconds is None else seconds):
            return None
        where = f"{self._options.main_process_ip}, port {self._port}"
        fix = "give all nodes the same --main_process_ip and --main_process_port, and allow TCP to it (firewall, network)"
        return PreflightError(f"{self._own.name} cannot connect to node 0 at {where}: {reason[0]}", fix=fix)

    # --- all --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._agent is not None:
            self._agent.close()


def failure(errors: list[Finding]) -> PreflightError:
    """One error for all these findings."""
    if len(errors) == 1:
        return PreflightError(errors[0].message, fix=errors[0].fix)
    lines = [line for error in errors for line in finding_lines(error)]
    return PreflightError("\n".join(["these nodes cannot train together:", *(f"  {line}" for line in lines)]))


def finding_lines(finding: Finding) -> list[str]:
    return [f"{finding.level}: {finding.message}", *([f"  fix: {finding.fix}"] if finding.fix else [])]


def summary(report: NodesReport) -> str:
    """The report in half a line."""
    counts = {level: len(report.of_level(level)) for level in ("error", "warning")}
    found = ", ".join(f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count)
    measured, parts = report.measured, [found or "the nodes agree"]
    if measured.visible_seconds is not None:
        parts.append(f"a renamed file is seen by all after {measured.visible_seconds:.2f} s")
    if measured.clocks:
        parts.append(f"clocks differ by up to {max(map(abs, measured.clocks.values())):,.3f} s")
    return "; ".join(parts)


def read_report(directory: Path) -> NodesReport | None:
    """The report that an earlier launch has left in this run directory; None if there is none, or one of another version."""
    try:
        return NodesReport.of_json(load_json(read_regular(directory / PREFLIGHT_REPORT)))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _values(config: Config) -> dict[str, object]:
    """The options that all nodes share; none if some are not valid."""
    try:
        values: dict[str, object] = load_json(json.dumps(config.masked(config.shared_values())))
        if not config[LaunchOptions].shared_output_dir:
            del values["output_dir"]
    except InvalidOptionError:
        return {}
    return values


def _devices(kind: str) -> Message:
    """The accelerators of this node. Imports torch only if there are any, as `accelerator_kind` has done before."""
    if kind == "cpu":
        return {"kind": "cpu", "count": 0, "name": "", "text": "CPU"}
    import torch

    try:
        count = torch.accelerator.device_count()
        name = str(torch.get_device_module(kind).get_device_name(0)) if count else kind
    except (RuntimeError, AttributeError) as error:
        return {"kind": kind, "count": 0, "name": kind, "text": kind, "problem": str(error).partition("\n")[0]}
    return {"kind": kind, "count": count, "name": name, "text": f"{count} x {name}"}


def _local_data(config: Config, plugins: Plugins) -> dict[str, Path]:
    """The folders of datasets on file systems, by id; none if the options of the data are not valid."""
    from smalti.data import catalog_of, dataset_specs

    try:
        specs = dataset_specs(config, catalog_of(plugins))
    except (UserError, InvalidOptionError):
        return {}
    return {spec.id: spec.instance_data_dir for spec in specs if spec.type == "local" and spec.instance_data_dir}


def _print(text: str) -> None:
    click.echo(f"smalti: {text}", err=True)
