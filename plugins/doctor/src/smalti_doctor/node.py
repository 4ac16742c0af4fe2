"""All checks of one node, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from smalti import Finding, InvalidOptionError
from smalti.config import Config, LaunchOptions, RunOptions
from smalti.plugins import Plugins, summary
from smalti_doctor.checks.devices import SECONDS, devices
from smalti_doctor.checks.environment import environment
from smalti_doctor.checks.host import host
from smalti_doctor.checks.memory import memory
from smalti_doctor.checks.processes import processes
from smalti_doctor.checks.processor import processor
from smalti_doctor.checks.software import software
from smalti_doctor.checks.storage import folders, storage
from smalti_doctor.checks.topology import topology
from smalti_doctor.masking import Mask
from smalti_doctor.plugin_checks import plugin_findings
from smalti_doctor.report import Report, Section
from smalti_doctor.time_limits import run_within

_SECONDS = 45.0
"""For each check but that of the devices. A network file system that does not answer hangs for ever."""


def diagnose_node(
    plugins: Plugins, config: Config | None = None, *, mask: Mask | None = None, seconds: float = SECONDS
) -> Report:
    """Check this node, for the run of this configuration if there is one. Prints nothing, and leaves nothing behind.

    `config` may be a draft with problems: options that are not valid count as not given. `seconds` limits the use of torch and
    its devices. What fails unexpectedly is a finding, so that the other checks are still reported.
    """
    mask = mask or Mask.of_run(config)
    output_dir = _output_dir(config)
    several, use_cpu = _launch(config)
    checks: Mapping[str, tuple[Callable[[], Section], float]] = {
        "software": (lambda: software(plugins), _SECONDS),
        "devices": (lambda: devices(use_cpu=use_cpu, seconds=seconds), seconds + _SECONDS),
        "processor": (processor, _SECONDS),
        "topology": (topology, _SECONDS),
        "memory": (memory, _SECONDS),
        "storage": (lambda: storage(folders(output_dir)), _SECONDS),
        "host": (lambda: host(several_nodes=several), _SECONDS),
        "environment": (lambda: environment(mask), _SECONDS),
        "processes": (lambda: processes(output_dir), _SECONDS),
        "plugins": (lambda: Section(name="plugins", findings=plugin_findings(plugins, config)), 2 * _SECONDS),
    }
    return Report(sections=tuple(_section(name, found) for name, found in run_within(checks).items()))


def _section(name: str, found: Section | Exception) -> Section:
    if isinstance(found, Section):
        return found
    if isinstance(found, TimeoutError):
        message = f"the check of {name} {found}"
        fix = "check the network file systems that are mounted here (mount, dmesg)" if name == "storage" else "check dmesg"
        return Section(name=name, findings=[Finding(check=name, level="error", message=message, fix=fix)])
    message = f"the check of {name} failed: {summary(found)}"
    return Section(name=name, findings=[Finding(check=name, level="warning", message=message, fix="report this as a defect")])


def _output_dir(config: Config | None) -> Path | None:
    try:
        return config[RunOptions].output_dir if config is not None else None
    except InvalidOptionError:
        return None


def _launch(config: Config | None) -> tuple[bool, bool]:
    """Whether the run has several nodes, and whether it trains on the CPU on purpose."""
    try:
        options = config[LaunchOptions] if config is not None else None
        return (options.num_machines > 1, options.use_cpu) if options is not None else (False, False)
    except InvalidOptionError:
        return False, False
