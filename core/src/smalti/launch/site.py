"""Where a launch happens: on this node, or on what a plugin says with `configure_launch`. Importing this imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from smalti.config import Config, LaunchOptions, TrainingOptions, package_of_nodes, variable_of_nodes
from smalti.errors import BrokenPlugin, ConfigError, ExitCode, GpuFaultError, UserError
from smalti.hookspecs import HookSpecs
from smalti.launch.launcher import LaunchResult, run_workers
from smalti.launch.plan import LaunchPlan, plan_launch
from smalti.launch.standby import StandbyLauncher
from smalti.plugins import Plugins, create
from smalti.rundir import STOPPED_EARLY, RunDirectory, RunWriter, acquire
from smalti.system import Terminated, importing, interrupt_main_thread
from smalti.types import DistributedPlan, LaunchEntry

Progress = Callable[[int, int | None], None]


@dataclass(kw_only=True)
class LaunchSite:
    """This node as the place of a launch. A package inherits from this class for launches with more than this node.

    `config` is the configuration before its precision was chosen, `environment` that of the command. Without `write` nothing
    is launched. `writer` owns the run directory; it is None where another node does (`joins`), and for a dry run. `facts` and
    `notices` are for people. The methods are called in their order here.
    """

    config: Config
    plugins: Plugins
    directory: RunDirectory
    kind: str
    environment: Mapping[str, str]
    write: bool
    writer: RunWriter | None = None
    joins: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()

    def open(self) -> None:
        """Check that this node can take part, before anything is written."""

    def plan(self, config: Config, distributed: DistributedPlan) -> LaunchPlan:
        """How the ranks of this node start, for the configuration with its precision."""
        return plan_launch(config, distributed, self.directory.path, self.kind, self.environment)

    def begin(self, config: Config) -> RunWriter:
        """Acquire the run directory. Raises InUseError if another run uses it."""
        self.writer = acquire(
            self.directory,
            config_digest=config.digest,
            world_size=config[LaunchOptions].num_processes,
            mixed_precision=config[TrainingOptions].mixed_precision,
            on_stop=interrupt_main_thread,
        )
        self.writer.events.mask = config.masked
        return self.writer

    def checked(self, progress: Progress) -> Progress:
        """The same reporting of progress while the data is scanned."""
        return progress

    def gather(self) -> None:
        """The files of the launch are written; wait for whatever takes part in it."""

    def run(self, config: Config, plan: LaunchPlan, standby: StandbyLauncher | None) -> LaunchResult:
        """Run to the end. `standby` can start the ranks."""
        if plan.launcher != "in-process":
            return run_workers(plan, self.directory, digest=config.digest, writer=self.writer, standby=standby)
        with importing():
            from smalti.launch.rank import run_rank

        os.environ.update(plan.environment)
        try:
            outcome = run_rank(config, self.plugins, self.writer)
        except GpuFaultError as error:
            return error.exit_code, str(error)
        except KeyboardInterrupt as stop:
            if self.writer is not None and self.writer.stop_request:
                return ExitCode.STOPPED, STOPPED_EARLY
            code = ExitCode.PREEMPTED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
            return code, "stopped outside of a training step; saved checkpoints and caches are intact"
        return outcome.exit_code, outcome.message

    def close(self) -> None:
        """Also called after an exception."""

    # --- what to type next ------------------------------------------------------------------------------------------

    def flags(self) -> str:
        """What the command of this node needs in addition to the run's configuration file, after a space."""
        return ""

    def to_resume(self, command: str) -> str:
        """How to start this launch again; `command` does on this node."""
        return f"run the same command again, or {command}"


def launch_entry(config: Config, plugins: Plugins, environment: Mapping[str, str]) -> LaunchEntry | None:
    """What a plugin says of this launch; None for one on this node alone.

    Raises ConfigError, with what to install, for a launch on several nodes without a plugin for it.
    """
    found = plugins.gather(HookSpecs.configure_launch, config=config)
    if len(found) > 1:
        names = " and ".join(entry.origin.plugin for entry in found)
        raise UserError(f"the plugins {names} both start the ranks of this launch", fix="disable one of them with --without")
    if found:
        return found[0]
    options, package = config[LaunchOptions], package_of_nodes()
    if package.plugin in plugins.infos and plugins.infos[package.plugin].state == "active":
        return None
    if options.num_machines > 1 or options.machine_rank > 0:
        name = "num_machines" if options.num_machines > 1 else "machine_rank"
        message = f"{name}={config.value(name)}: a run on several nodes needs {package.distribution}"
        raise ConfigError([package.problem(message, config.source(name))])
    given = config.source("num_machines").startswith(("flag", "environment", "Accelerate YAML"))
    if not given and (variable := variable_of_nodes(environment)):
        message = f"{variable} in the environment: a run on several nodes needs {package.distribution}"
        problem = package.problem(message, "environment")
        raise ConfigError([replace(problem, fix=f"{problem.fix}; or --num_machines=1 to train on this node alone")])
    return None


def open_site(entry: LaunchEntry | None, plugins: Plugins, **settings: Any) -> LaunchSite:
    """The place of a launch, from the fields of `LaunchSite`. Other nodes have been found then."""
    site = LaunchSite(plugins=plugins, **settings) if entry is None else create(entry, entry.site, plugins=plugins, **settings)
    if not isinstance(site, LaunchSite):
        message = f"{cast(LaunchEntry, entry).origin} returned {type(site).__name__} for a launch, not a LaunchSite"
        raise BrokenPlugin(message, fix=cast(LaunchEntry, entry).origin.workaround)
    site.open()
    return site
