"""A run on Ray from its first worker to its end. Ray places workers and says which are lost; as a group of nodes they train.

The group itself (`smalti_cluster.elastic`) continues without a lost worker, with the same effective batch, and takes back one
that comes. Here are the places for workers, a stop of all where one of their nodes is drained, and a new start of all where the
group has ended though the run could go on.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import ray
from ray.exceptions import RayActorError

from smalti import ExitCode, UserError
from smalti.launch import LaunchResult, received_signals
from smalti.rundir import STALE_SECONDS, RunDirectory
from smalti_cluster.nodes.nodes import EXPECTED_VARIABLE, running_group
from smalti_ray.cluster import check_versions
from smalti_ray.launch.placement import POLL_SECONDS, Needs, Placement, draining, numbers
from smalti_ray.launch.report import Report
from smalti_ray.launch.worker import Facts

_AGAIN = (ExitCode.PREEMPTED, ExitCode.KILLED, ExitCode.GPU_FAULT)
"""The exit codes after which the run is started again, on other nodes where some are lost or faulty."""
_MORE_SECONDS = 10.0
"""How long more workers than the least are waited for. Those that come later join the group as it trains."""
_CHECK_SECONDS = 2.0
_CREATE_SECONDS = 300.0
"""How long a worker may take to start once it has resources: it imports torch's packages from a cold disk."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every worker runs. `words` are the arguments of `smalti train`, without those of a node, `processes` the ranks of
    a worker, `folder` the current one. `files` are those that workers have to see, with their content. `restarts` is how often
    all may start again without a new step.
    """

    words: Sequence[str]
    processes: int
    folder: str
    directory: RunDirectory
    files: Mapping[str, str]
    restarts: int

    def arguments(self, needs: Needs, number: int, first: Facts) -> list[str]:
        """Those of a worker; `first` is where worker 0 is."""
        words = [*self.words, f"--num_processes={needs.most * self.processes}"]
        if needs.most == 1:
            return words
        nodes = str(needs.most) if needs.least == needs.most else f"{needs.least}:{needs.most}"
        place = {"nodes": nodes, "num_machines": needs.most, "machine_rank": number}
        place |= {"main_process_ip": first.address, "main_process_port": first.port}
        return [*words, *(f"--{name}={value}" for name, value in place.items())]

    @property
    def step(self) -> int:
        last = self.directory.latest("step")
        return last.step or 0 if last is not None else 0


def drive(needs: Needs, run: Run) -> LaunchResult:
    """Train to the end, a request to stop, or a failure that would come again. Raises UserError for what the user can fix."""
    fruitless = 0
    with shared_file(run.directory.path) as probe, received_signals() as received:
        run = replace(run, files={**run.files, **probe})
        while True:
            before = run.step
            placement = Placement(needs=needs, directory=run.directory.path, stopped=lambda: bool(received))
            try:
                if not placement.place():
                    return _stopped(received), "stopped before a worker was started; nothing was changed"
                code, message = Launch(run=run, placement=placement, received=received).to_end()
            finally:
                placement.close()
            if received or code not in _AGAIN:
                interrupted = code is ExitCode.PREEMPTED and received[:1] == [signal.SIGINT]
                return (ExitCode.INTERRUPTED if interrupted else code), message
            fruitless = 0 if run.step > before else fruitless + 1
            if fruitless > run.restarts:
                return code, f"{message}\n  not started again: no step in {fruitless} launches (--restarts={run.restarts})"
            click.echo(f"smalti: all workers start again (exit code {int(code)}): {message}", err=True)
            _wait_for_the_last(run.directory, received)


@contextmanager
def shared_file(directory: Path) -> Iterator[dict[str, str]]:
    """A file in the run directory by which workers know that they share it, with its content.

    A directory made for it is removed if nothing else is in it at the end. Raises UserError if it cannot be written.
    """
    file, token = directory / f".launch-{os.getpid()}", secrets.token_hex(8)
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror or error}", fix="choose another --output_dir") from error
    try:
        yield {str(file): token}
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # the run is in it
            for each in made:
                each.rmdir()


def _stopped(received: Sequence[int]) -> ExitCode:
    return ExitCode.INTERRUPTED if received[:1] == [signal.SIGINT] else ExitCode.PREEMPTED


def _wait_for_the_last(directory: RunDirectory, received: Sequence[int]) -> None:
    """Until no process of the last launch owns the run directory: one whose worker is lost may still save."""
    silent = 0.0
    while not received and silent < STALE_SECONDS:
        heartbeat = directory.watch_heartbeat()
        if heartbeat is None or heartbeat.alive() is False:
            return
        silent = directory.heartbeat_watch.silence
        time.sleep(POLL_SECONDS)


@dataclass(kw_only=True)
class Launch:
    """One start of all workers that have a place. `received` are the signals so far."""

    run: Run
    placement: Placement
    received: Sequence[int]
    _facts: dict[int, Facts] = field(default_factory=dict)
    _asked: dict[Any, int] = field(default_factory=dict)
    """Workers that have been asked where they are, and have not answered, by what `ray.wait` takes."""
    _running: dict[Any, int] = field(default_factory=dict)
    _codes: dict[int, int] = field(default_factory=dict)
    _stopping: set[int] = field(default_factory=set)

    def to_end(self) -> LaunchResult:
        begun = time.time()
        for number in self.placement.workers:
            self._ask(number)
        if not self._gather():
            return _stopped(self.received), "stopped before a worker was started; nothing was changed"
        first, started = self._facts[0], sorted(self._facts)
        if started != sorted(self.placement.workers):
            missing = numbers([each for each in self.placement.workers if each not in started])
            click.echo(f"smalti: starting without {missing}, which Ray has not placed yet", err=True)
        for number in started:
            self._start(number, first, started)
        report = Report(self.placement.needs.name, self.run.directory, begun)
        looked = 0.0
        while self._running:
            self._note_ended()
            if self.received:
                self._stop(self._running.values(), "")
            if len(self.received) > 1:
                return _stopped(self.received), "not waited for any longer; the workers save and stop on their own"
            if time.monotonic() - looked > _CHECK_SECONDS:
                looked = time.monotonic()
                self._stop_drained()
                self._start_late(first)
                report.update()
        report.update()
        return self._result(begun)

    # --- the start ------------------------------------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        self._asked[self.placement.workers[number].facts.remote()] = number

    def _replace(self, number: int) -> None:
        self.placement.replace(number)
        self._ask(number)

    def _gather(self) -> bool:
        """Wait until all of the least number of workers are there, and a little for the others. False after a signal."""
        least, deadline = self.placement.needs.least, time.monotonic() + _CREATE_SECONDS
        complete: float | None = None
        while self._asked and (complete is None or time.monotonic() - complete < _MORE_SECONDS):
            if self.received:
                return False
            for number in self._answered():
                self._check(number)
            if complete is None and all(number in self._facts for number in range(least)):
                complete = time.monotonic()
            if complete is None and time.monotonic() > deadline:
                raise UserError(f"workers did not start within {_CREATE_SECONDS:.0f} s", fix="see the logs of Ray: ray logs")
        return True

    def _answered(self) -> Iterator[int]:
        """The workers that have said where they are. One that is lost, or that is on a node that is avoided, is replaced."""
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=POLL_SECONDS)
        for each in done:
            number = self._asked.pop(each)
            try:
                facts = ray.get(each)
            except RayActorError as error:
                if "No module named" in str(error):
                    fix = "install the same packages on all nodes of the cluster, smalti-ray among them"
                    raise UserError(f"worker {number} cannot start: {str(error).splitlines()[-1]}", fix=fix) from error
                self._replace(number)
                continue
            if self.placement.avoids(facts.node):
                self._replace(number)
                continue
            self._facts[number] = facts
            yield number

    def _check(self, number: int) -> None:
        """Raises UserError if a worker has other versions, or does not see the files of the run."""
        facts = self._facts[number]
        check_versions(f"worker {number} ({facts.host})", facts.versions)
        folder = str(self.run.directory.path)
        asked = self.placement.workers[number].missing.remote(self.run.files, folder, self.run.folder)
        if missing := ray.get(asked, timeout=_CREATE_SECONDS):
            raise UserError(
                f"worker {number} ({facts.host}) does not share {', '.join(missing)} with this process",
                fix="keep the configuration, the data and --output_dir on storage that all nodes mount at the same path",
            )

    def _start(self, number: int, first: Facts, expected: Sequence[int]) -> None:
        words = self.run.arguments(self.placement.needs, number, first)
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""), EXPECTED_VARIABLE: ",".join(map(str, expected))}
        self._running[self.placement.workers[number].run.remote(words, self.run.folder, variables)] = number

    # --- while it trains ------------------------------------------------------------------------------------------------

    def _note_ended(self) -> None:
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
        for each in done:
            number = self._running.pop(each)
            facts = self._facts.pop(number)
            try:
                code = self._codes[number] = ray.get(each)
            except RayActorError:
                code = ExitCode.KILLED
                click.echo(f"smalti: worker {number} ({facts.host}) was lost: Ray's process of it, or its node", err=True)
            elastic = self.placement.needs.least < self.placement.needs.most
            if code in (ExitCode.KILLED, ExitCode.GPU_FAULT) and elastic and self._running and not self.received:
                self._replace(number)  # not on a node whose accelerator has failed

    def _stop(self, chosen: Collection[int], why: str) -> None:
        for number in set(chosen) - self._stopping:
            self._stopping.add(number)
            if why:
                click.echo(f"smalti: {why}", err=True)
            self.placement.workers[number].stop.remote()

    def _stop_drained(self) -> None:
        """All workers save and stop together if one of them is on a node that Ray is about to take away."""
        leaving = draining()
        for number in self._running.values():
            if (facts := self._facts[number]).node in leaving:
                self._stop([number], f"Ray drains the node of worker {number} ({facts.host}): the run saves and stops")

    def _start_late(self, first: Facts) -> None:
        """Let workers that have come join the group, if it trains. It takes them in when `--grow_after` says."""
        for number in self._answered():
            self._check(number)
        running = set(self._running.values())
        for number in sorted(set(self._facts) - running):
            if not self._stopping and running_group(self.run.directory) is not None:
                click.echo(f"smalti: worker {number} ({self._facts[number].host}) has come, and joins the group", err=True)
                self._start(number, first, [number])

    # --- the end --------------------------------------------------------------------------------------------------------

    def _result(self, begun: float) -> LaunchResult:
        """How the run has ended: as its directory says, else as the first worker."""
        status, record = self.run.directory.status(), self.run.directory.record()
        if record is not None and (record.started or 0) > begun and status.ended and status.exit_code is not None:
            return ExitCode(status.exit_code), status.message
        codes = [self._codes[number] for number in sorted(self._codes)]
        if int(ExitCode.DONE) in codes:
            return ExitCode.DONE, "complete"
        failed = [code for code in codes if code in set(ExitCode)]
        if not failed:
            return ExitCode.KILLED, "all workers were lost"
        return ExitCode(failed[0]), "see the output of the workers"
