"""The workers of a job on a Ray cluster, as actors: asked for while there is work, replaced when lost, ended when idle.

Ray Data is not used: its blocks go through the object store, while here a task is a range of keys whose images the worker reads
itself and whose results it writes itself; and its workers cannot be told to write what they have when the command is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from smalti import UserError
from smalti_ray.cluster import check_versions, what_it_has
from smalti_ray.data.options import EngineOptions
from smalti_ray.data.worker import Failure, Job, Opened, Worker

_ROUND_SECONDS = 0.5
_PROGRESS_SECONDS = 5.0
_NOTICE_SECONDS = 30.0
_STOP_SECONDS = 60.0
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""An actor's methods run in other threads than the main one, whose arenas glibc gives back to the system after each image."""
_LOST = 3
"""How many workers a task, or the start of workers, may cost."""


class Tasks(Protocol):
    """What workers do. All methods are called in the thread of `Workers.run`."""

    def waiting(self) -> int:
        """How many tasks no worker has."""
        ...

    def next(self) -> Any:
        """The next of them."""
        ...

    def lost(self, task: Any) -> None:
        """The worker of a task is gone; another one is to do it."""
        ...

    def done(self, task: Any, result: Any) -> None: ...

    def ended(self) -> bool:
        """Whether all tasks are done, and none will follow."""
        ...

    def show(self, doing: int) -> None:
        """Called every few seconds, with what workers have done of tasks that are not done."""
        ...


@dataclass(eq=False)
class _Actor:
    handle: Any
    call: Any
    """The call that it has not answered: `facts`, `open`, `do`."""
    node: str = ""
    opened: bool = False
    task: Any = None
    polled: Any = None
    progress: int = 0


@dataclass(kw_only=True)
class Workers:
    """The workers of a job. `gpus` are those of each; `say` gets lines for the user."""

    job: Job
    options: EngineOptions
    gpus: float
    say: Callable[[str], object]
    _actors: list[_Actor] = field(default_factory=list)
    _costs: dict[str, int] = field(default_factory=dict)
    """How many workers each task has lost."""
    _encoders: Mapping[str, str] = field(default_factory=dict)
    """Those of the first worker."""
    _waited: float = field(default_factory=time.monotonic)
    """When a worker was there last."""
    _noticed: float = field(default_factory=time.monotonic)
    _polled: float = 0.0

    def run(self, tasks: Tasks, *, last: bool = False) -> None:
        """Have all tasks done. Workers stay for the next call, unless these are the `last` tasks; see `close`.

        Raises UserError if the cluster has no room, if a node differs, or what failed on a worker. What they have encoded is
        written before that, also for a signal or Ctrl-C.
        """
        import ray

        try:
            while not tasks.ended():
                self._ask(tasks.waiting(), last=last)
                self._give(tasks)
                calls = {actor.call: actor for actor in self._actors if actor.call is not None}
                if not calls:
                    time.sleep(_ROUND_SECONDS / 10)
                    continue
                ready, _ = ray.wait(list(calls), num_returns=1, timeout=_ROUND_SECONDS)
                for call in ready:
                    self._answered(calls[call], tasks)
                self._poll(tasks)
                self._notice()
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """End all workers."""
        for actor in list(self._actors):
            self._end(actor)

    # --- more and fewer workers ---------------------------------------------------------------------------------------

    def _ask(self, waiting: int, *, last: bool) -> None:
        """Ask for as many workers again as there are, one at first, while tasks wait; end those for which no task will come."""
        if last and waiting == 0:
            for actor in [actor for actor in self._actors if actor.task is None]:
                self._end(actor)
        opened = sum(actor.opened for actor in self._actors)
        most = self.options.engine_workers or len(self._actors) + waiting
        while len(self._actors) - opened < min(max(1, opened), waiting) and len(self._actors) < most:
            self._start()

    def _start(self) -> None:
        import ray

        reserved = {"num_cpus": self.options.engine_cpus, "num_gpus": self.gpus}
        actor = ray.remote(Worker).options(
            **reserved, max_concurrency=2, scheduling_strategy="SPREAD", runtime_env={"env_vars": _ENVIRONMENT}
        )
        handle: Any = actor.remote()
        self._actors.append(_Actor(handle, handle.facts.remote()))

    def _end(self, actor: _Actor) -> None:
        import ray

        self._actors.remove(actor)
        with suppress(ValueError, RuntimeError):  # it is gone already
            ray.kill(actor.handle)

    def _stop(self) -> None:
        """Let workers write what they have, and end them."""
        import ray

        with suppress(ray.exceptions.RayError, OSError, RuntimeError, ValueError):  # the cluster may be gone
            working = {actor.call: actor for actor in self._actors if actor.task is not None and actor.call is not None}
            for actor in working.values():
                actor.handle.stop.remote()
            if working:
                ray.wait(list(working), num_returns=len(working), timeout=_STOP_SECONDS)
            self.close()

    # --- what workers do ----------------------------------------------------------------------------------------------

    def _give(self, tasks: Tasks) -> None:
        for actor in self._actors:
            if actor.opened and actor.call is None and tasks.waiting():
                actor.task, actor.progress = tasks.next(), 0
                actor.call = actor.handle.do.remote(actor.task)

    def _answered(self, actor: _Actor, tasks: Tasks) -> None:
        import ray

        call, actor.call = actor.call, None
        try:
            answer = ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._lose(actor, tasks, error)
            return
        if isinstance(answer, Failure):
            raise answer.raised(actor.node)
        if isinstance(answer, Opened):
            self._encoders = self._encoders or answer.encoders
            check_encoders(actor.node, answer.encoders, self._encoders)
            actor.opened = True
            self._costs.pop("", None)
        elif not actor.opened:
            actor.node = answer["node"]
            check_versions(f"node {actor.node}", answer)
            actor.call = actor.handle.open.remote(self.job)
        else:
            task, actor.task, actor.progress = actor.task, None, 0
            self._costs.pop(f"{task}", None)
            tasks.done(task, answer)

    def _lose(self, actor: _Actor, tasks: Tasks, error: Exception) -> None:
        """A worker or its node is gone: another worker does its task, which skips what this one has written."""
        self._end(actor)  # so that it cannot go on if only the connection was lost
        reason = " ".join(f"{error}".split())
        name = f"{actor.task}" if actor.task is not None else ""
        what = name or "the start of a worker"
        self._costs[name] = self._costs.get(name, 0) + 1
        if self._costs[name] >= _LOST:
            fix = "look into Ray's logs of the workers; if memory ran out, reserve more: --engine_cpus, --engine_gpus"
            if "No module named" in reason:
                fix = "install smalti-ray and the packages of the configuration on every node"
            raise UserError(f"{what} has ended {_LOST} workers; the last one: {reason}", fix=fix)
        if actor.task is not None:
            tasks.lost(actor.task)
        self.say(f"a worker{f' on node {actor.node}' if actor.node else ''} is lost; {what} is done again by another one")

    def _poll(self, tasks: Tasks) -> None:
        """Ask workers for their progress, and show it."""
        import ray

        if time.monotonic() - self._polled < _PROGRESS_SECONDS:
            return
        self._polled = time.monotonic()
        for actor in self._actors:
            if actor.polled is not None and ray.wait([actor.polled], timeout=0)[0]:
                with suppress(ray.exceptions.RayError):  # it is lost, which its task tells
                    actor.progress = ray.get(actor.polled) if actor.task is not None else 0
                actor.polled = None
            if actor.task is not None and actor.polled is None:
                actor.polled = actor.handle.progress.remote()
        tasks.show(sum(actor.progress for actor in self._actors))

    def _notice(self) -> None:
        """Say what the cluster lacks as long as there is no worker. Raises UserError after `engine_wait` seconds."""
        now = time.monotonic()
        if any(actor.node for actor in self._actors):
            self._waited = self._noticed = now
            return
        wanted = {"CPU": self.options.engine_cpus, "GPU": self.gpus}
        wanted = {kind: amount for kind, amount in wanted.items() if amount}
        text = " and ".join(f"{amount:g} {kind}" for kind, amount in wanted.items())
        limit = self.options.engine_wait
        if limit and now - self._waited > limit:
            fix = "wait for it, add nodes, or reserve less: --engine_cpus, --engine_gpus, --use_cpu; --engine_wait waits longer"
            raise UserError(f"the cluster had no room for a worker with {text} in {limit:g} s ({what_it_has()})", fix=fix)
        if now - self._noticed > _NOTICE_SECONDS:
            self._noticed = now
            self.say(f"waiting for a node with room for a worker: {text} ({what_it_has()})")


def check_encoders(node: str, theirs: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raises UserError if a node would encode into other stores than the first one: `first` and `theirs` identify encoders."""
    if different := [kind for kind, encoder in theirs.items() if first[kind] != encoder]:
        raise UserError(
            f"node {node} encodes {' and '.join(different)} with other weights or settings than the first one",
            fix="use the same model on every node",
        )
