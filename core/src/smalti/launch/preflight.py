"""What `smalti train` does before any worker exists: check everything, report what will happen, then launch.

`LaunchSite` is where that happens: this node, or what a plugin says with `configure_launch`. Importing this imports no torch.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from smalti.checkpoint import STATE, read_state
from smalti.config import (
    Config,
    LaunchOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    TrainingOptions,
    as_toml,
    warm_up_notice,
    warm_up_problem,
)
from smalti.data import PreparedData, check_sources, ranks_scan, scan_data, scan_progress, total_steps
from smalti.errors import BrokenPlugin, ConfigError, ExitCode, GpuFaultError, TakenOverError
from smalti.hookspecs import HookSpecs
from smalti.launch.checks import CheckedRun, check_run
from smalti.launch.plan import (
    LaunchPlan,
    allocator_settings,
    check_accelerators,
    expected_kind,
    plan_launch,
    write_launch_files,
    yaml_text,
)
from smalti.parallel import ImageSize, accelerator_kind, choose_precision, cost_of, cpu_notices, describe, describe_devices
from smalti.plugins import Plugins, choose_distributed, create, lines_of_each
from smalti.rundir import STOPPED_EARLY, RunDirectory, RunWriter, acquire, overview
from smalti.system import Stopped, Terminated, exit_reports, importing, interrupt_main_thread, record_hook_in
from smalti.training import check_resumable
from smalti.types import DistributedPlan, LaunchEntry

if TYPE_CHECKING:
    from smalti.launch.launcher import LaunchResult
    from smalti.launch.standby import StandbyLauncher
    from smalti.models import ModelFamily

Progress = Callable[[int, int | None], None]
_SHOWN = 10
"""Unusable samples that a dry run prints; the quarantine files list them all."""
_FIRST = ("device", "precision", "tokens", "network")
"""The facts that are printed at launch. The others are printed when training begins."""


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
        if plan.launcher == "in-process":
            return self._run_here(config, plan)
        from smalti.launch.launcher import received_signals, run_workers

        with received_signals() as received:
            ended = run_workers(
                plan,
                self.directory,
                received,
                digest=config.digest,
                writer=self.writer,
                standby=standby,
                ended_elsewhere=self.ended_elsewhere,
            )
        return ended.code, ended.message

    def ended_elsewhere(self) -> LaunchResult | None:
        """A result that ends the ranks of this node, from whatever else takes part. Asked all the time while they run."""
        return None

    def _run_here(self, config: Config, plan: LaunchPlan) -> LaunchResult:
        with importing():
            from smalti.launch.rank import run_rank

        os.environ.update(plan.environment)
        try:
            with record_hook_in(None):
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


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A checked configuration with its launch plan and its data.

    `data` is None if another process has scanned it, and if the ranks will scan it. `facts` describe the
    "device" and the "precision" of the run, and what the `site` says; where the data were scanned, also the number of
    "tokens" of the largest images and the noise levels ("timesteps") of training. The site has the run directory, if this
    process owns it, and starts the ranks.
    """

    config: Config
    plan: LaunchPlan
    data: PreparedData | None
    facts: Mapping[str, str]
    site: LaunchSite
    notices: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, plugins: Plugins, *, write: bool) -> Preparation:
        """Check the configuration, choose the strategy, scan the data and check the buckets against the effective batch.

        With `write`, the run directory is acquired and keeps the index of the data. Else nothing is written, and this node
        may lack the accelerators. Raises UserError, ConfigError or PreflightError, and Stopped after a request to stop.
        """
        checked = check_run(config, plugins, thorough=not write)
        site, notices = open_site(checked.launch, config, plugins, write=write)
        kind, config = site.kind, choose_precision(config, site.kind, site.directory)
        distributed = checked.distributed if config is site.config else choose_distributed(config, plugins)
        plan = site.plan(config, distributed)
        notices += [*site.notices, *config.notices, *checked.notices, *checked.family.notices, *plan.notices]
        notices += cost_of(config, kind)
        facts = {"device": describe_devices(config, kind), "precision": describe(config, kind), **site.facts}
        data, of_plugins = None, []
        if not site.joins:
            of_plugins = lines_of_each(plugins, HookSpecs.notices_before_launch, config=config, plan=distributed, kind=kind)
            with _failures_recorded(site):
                data = _scanned(config, site, checked)
                if data is not None:
                    size = _largest_image(checked.family, data)
                    facts["tokens"] = str(size)
                    facts["timesteps"] = checked.loss.describe_timesteps(count.bucket for count in data.counts)
                    notices += _resume_notices(config, data, checked.checkpoint, printed_later=write)
                    notices += [*_schedule_notices(config, data), *cpu_notices(config, kind, size), *data.notices]
        return cls(
            config=config,
            plan=plan,
            data=data,
            facts={name: fact for name, fact in facts.items() if fact},
            site=site,
            notices=tuple(dict.fromkeys([*notices, *of_plugins])),
        )

    @property
    def directory(self) -> RunDirectory:
        return self.site.directory

    def launch(self, standby: StandbyLauncher | None = None) -> ExitCode:
        """Run to the end. The last lines of output say how it ended and how to continue. `standby` can start the ranks."""
        for notice in self.notices:
            click.echo(f"smalti: note: {notice}", err=True)
        click.echo(f"smalti: {'; '.join(f'{name} {self.facts[name]}' for name in _FIRST if name in self.facts)}", err=True)
        click.echo(f"smalti: {self.site.plugins.summary}", err=True)
        with _failures_recorded(self.site):
            write_launch_files(self.directory, self.config, self.site.plugins, self.plan)
            if self.site.writer is not None:
                self.site.writer.keep_files()
            self.site.gather()
            sys.stdout.flush()
            code, message = self.site.run(self.config, self.plan, standby)
        writer = self.site.writer
        if writer is not None:
            lines = lines_of_each(
                self.site.plugins, HookSpecs.on_launch_end, directory=self.directory, events=writer.events, code=code
            )
            for line in lines:
                click.echo(f"  {line}", err=True)
            writer.end_launch(code, message)
            if writer.ownership.lost:
                code, message = ExitCode.TAKEN_OVER, writer.ownership.message
        self._print_summary(code, message)
        if writer is not None:
            writer.close()
        return code

    def _print_summary(self, code: ExitCode, message: str) -> None:
        if code is ExitCode.TAKEN_OVER:
            click.echo(f"smalti: ended with exit code {int(code)}: {message}", err=True)
            return
        results = self._results()
        for title, path in results.items():
            click.echo(f"  {title:<12} {path}", err=True)
        complete = code is ExitCode.DONE
        click.echo(f"smalti: {'done' if complete else f'ended with exit code {int(code)}'}: {message}", err=True)
        if not self.directory.config_file.exists():  # removed by the user
            return
        again = f"{program_name()} train {shlex.quote(str(self.directory.config_file))}{self.site.flags()}"
        if complete:
            last = self.directory.latest("step")
            if last is None or last.number("max_steps") == last.step:  # else a plugin has ended it
                click.echo(f"  train longer {again}{_twice_as_long(self.config)}", err=True)
            if "checkpoint" in results:
                click.echo(f"  use it       {self._export_command()}", err=True)
        else:
            click.echo(f"  to resume    {self.site.to_resume(again)}", err=True)

    def _export_command(self) -> str:
        """The command that writes what inference loads, which then says how."""
        target = self.directory.path.with_name(f"{self.directory.path.name}-export")
        command = f"{program_name()} checkpoint export {shlex.quote(str(self.directory.path))} --to={shlex.quote(str(target))}"
        is_adapter = self.config[ModelOptions].model_type == "lora"
        return f"{command}    (for ComfyUI: --format=comfyui)" if is_adapter else command

    def _results(self) -> dict[str, Path]:
        from smalti.checkpoint import CheckpointStore

        found = {}
        if samples := sorted(self.directory.samples.glob("*/")):
            found["images"] = overview(samples[-1])
        if self.directory.loss_plot.exists():
            found["loss plot"] = self.directory.loss_plot
        if entries := CheckpointStore(self.directory.checkpoints).all():
            found["checkpoint"] = entries[-1].path
        return found

    # --- dry run ----------------------------------------------------------------------------------------------------

    def describe(self, commands: Sequence[str] = ()) -> dict[str, object]:
        """What a launch would do, for JSON. `commands` are those of all nodes, if there are several."""
        assert self.data is not None, "a dry run reads the data, on every node"
        described = {
            "launch": self.plan.as_json(),
            **({"nodes": list(commands)} if commands else {}),
            **self.facts,
            "config": {"digest": self.config.digest, "changes": self.config.changes()},
            "sources": {name: self.config.source(name) for name in self.config.sources},
            "plugins": list(self.site.plugins.versions),
            "notices": list(self.notices),
            "effective_batch": self.data.order.effective_batch,
            "steps": total_steps(self.config, self.data),
            "samples": self.data.samples_per_epoch,
            "buckets": [{"size": str(count.bucket), "samples": count.total} for count in self.data.counts],
            "quarantined": [{"key": item.key, "reason": item.reason} for item in self.data.quarantined],
        }
        return cast(dict[str, object], self.config.masked(described))

    def as_text(self, commands: Sequence[str] = ()) -> str:
        """The same as text, with the files that a launch would write."""
        assert self.data is not None, "a dry run reads the data, on every node"
        plan = self.plan
        lines = [f"node {node:<9}{command}" for node, command in enumerate(commands)]
        lines += [f"strategy      {plan.distributed.title}", f"launcher      {plan.launcher}"]
        if plan.command:
            lines.append(f"command       {shlex.join(plan.command)}")
        lines += [f"environment   {key}={value}" for key, value in plan.environment.items()]
        lines += [f"{name:<13} {fact}" for name, fact in self.facts.items()]
        lines.append(f"steps         {total_steps(self.config, self.data)}, each of {self.data.order.effective_batch} samples")
        lines.append(f"samples       {self.data.samples_per_epoch} in an epoch")
        lines += [f"bucket        {count.bucket}: {count.total}" for count in self.data.counts]
        unusable = chain.from_iterable(index.unusable_rows() for index in self.data.indexes)
        lines += [f"quarantined   {item.key}: {item.reason}" for item in islice(unusable, _SHOWN)]
        if self.data.unusable > _SHOWN:
            lines.append(f"quarantined   and {self.data.unusable - _SHOWN} more")
        lines += [f"note          {notice}" for notice in self.notices]
        lines += ["", f"{self.directory.config_file}:", *_indented(as_toml(self.config))]
        if plan.accelerate_file is not None:
            lines += ["", f"{plan.accelerate_file}:", *_indented(yaml_text(plan.accelerate))]
        if plan.distributed.settings:
            lines += ["", f"{plan.distributed.title}:", *_indented(json.dumps(plan.distributed.settings, indent=2))]
        return str(self.config.masked("\n".join(lines)))


def open_site(entry: LaunchEntry | None, config: Config, plugins: Plugins, *, write: bool) -> tuple[LaunchSite, list[str]]:
    """The place of a launch, with notices about its devices. Other nodes have been found then."""
    kind, notices, environment = accelerator_kind(config), [], dict(os.environ)
    if write:
        os.environ.update(allocator_settings(kind, environment))  # torch reads them once, when it first uses a device
        check_accelerators(config, kind)
    elif kind == "cpu" and (expected := expected_kind(config)) is not None:
        kind = expected
        notices.append(f"the launch is planned for {kind} devices, as in the Accelerate YAML; this node has none")
    directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
    fields: dict[str, Any] = {"config": config, "plugins": plugins, "directory": directory, "kind": kind}
    fields |= {"environment": environment, "write": write}
    site = LaunchSite(**fields) if entry is None else create(entry, entry.site, **fields)
    if not isinstance(site, LaunchSite):
        message = f"{cast(LaunchEntry, entry).origin} returned {type(site).__name__} for a launch, not a LaunchSite"
        raise BrokenPlugin(message, fix=cast(LaunchEntry, entry).origin.workaround)
    site.open()
    return site, notices


def _scanned(config: Config, site: LaunchSite, checked: CheckedRun) -> PreparedData | None:
    """The data, after the run directory was acquired to keep its index; None if the ranks will scan it.

    Raises UserError if what is encoded ahead cannot be kept; ranks would find that out much later.
    """
    plugins, alignment = site.plugins, checked.family.alignment
    if not site.write:
        return scan_data(config, plugins, alignment, None)
    from smalti.data import find_encoder

    writer, folder = site.begin(config), site.directory.data
    later = ranks_scan(config, plugins, folder)
    if (encoder := find_encoder(config, plugins, checked.family)) is not None:
        encoder.check()
    if later:
        check_sources(config, plugins)
        return None
    writer.phases.enter("scanning")
    begin = scan_progress(writer.phases)
    started = writer.record.started
    return scan_data(config, plugins, alignment, folder, lambda name: site.checked(begin(name)), attempt=started)


def _twice_as_long(config: Config) -> str:
    """The flag with which a completed run trains for as long again."""
    options = config[RunOptions]
    if options.max_train_steps is not None:
        return f" --max_train_steps={2 * options.max_train_steps}"
    return f" --num_train_epochs={2 * options.num_train_epochs}" if options.num_train_epochs is not None else ""


@contextmanager
def _failures_recorded(site: LaunchSite) -> Iterator[None]:
    """Record an exception as the end of the run. It becomes `Stopped` if a stop was requested."""
    try:
        yield
    except BaseException as error:
        site.close()
        if (writer := site.writer) is None:
            raise
        if writer.ownership.lost and isinstance(error, KeyboardInterrupt):
            writer.close()
            raise TakenOverError(writer.ownership.message, fix="watch the run that has taken over") from None
        requested = isinstance(error, KeyboardInterrupt) and writer.stop_request
        if requested:
            writer.end_launch(ExitCode.STOPPED, STOPPED_EARLY)
        else:
            writer.end_launch(exit_reports.exit_code_of(error), exit_reports.describe(error))
        writer.close()
        if requested:
            raise Stopped from None
        raise


def _resume_notices(config: Config, data: PreparedData, checkpoint: Path | None, *, printed_later: bool) -> tuple[str, ...]:
    """Notices about the data for a resume from this checkpoint; none if the run prints them when it resumes.

    Raises CheckpointError if the checkpoint belongs to another run.
    """
    if checkpoint is None:
        return ()
    resumable = check_resumable(read_state(checkpoint / STATE).trainer, config, data, checkpoint)
    return () if printed_later else resumable.notices


def _schedule_notices(config: Config, data: PreparedData) -> list[str]:
    """Notices about the warm-up, now that the length of epochs is known. Raises ConfigError if it is longer than the run."""
    options, steps = config[OptimizerOptions], total_steps(config, data)
    if (problem := warm_up_problem(options, steps)) is not None:
        raise ConfigError([problem])
    notice = warm_up_notice(options, steps)
    return [notice] if notice else []


def _largest_image(family: ModelFamily, data: PreparedData) -> ImageSize:
    """The size of training images with the most tokens."""
    sizes = [
        ImageSize(tokens=family.image_tokens(bucket.width, bucket.height), width=bucket.width, height=bucket.height)
        for bucket in (count.bucket for count in data.counts)
    ]
    return max(sizes, key=lambda size: size.tokens)


def program_name() -> str:
    """How to call this program: by name if the shell finds it, else by the path by which it was called."""
    called = Path(sys.argv[0])
    if called.name not in ("smalti", "smalti-train"):
        return f"{shlex.quote(sys.executable)} -m smalti"
    found = shutil.which("smalti")
    return "smalti" if found and Path(found).samefile(called.with_name("smalti")) else str(called.with_name("smalti"))


def _indented(text: str) -> list[str]:
    return [f"  {line}" if line else "" for line in text.rstrip().splitlines()]
