"""Commands of smalti that take a while: started by a page, followed by it, and kept when the page is left."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from smalti.system import kill_tree, load_json
from smalti_webui.server.processes import command, environment

_KEPT_JOBS = 50
_KEPT_LINES = 400
_MOST_OUTPUT = 64 << 20
_PROGRESS = re.compile(r"^(?P<what>.*?): (?P<done>\d+)(?: of (?P<total>\d+))?$")


@dataclass(kw_only=True)
class Job:
    """A command. `result` is its output, read as JSON. `code` is None while it runs. `lines` is the end of standard error.

    `template` shows the result, with `context`. `announced`: a page has shown a message about its end.
    """

    id: str
    title: str
    args: tuple[str, ...]
    template: str
    context: Mapping[str, Any]
    begun: float = field(default_factory=time.time)
    ended: float | None = None
    code: int | None = None
    result: Any | None = None
    progress: tuple[str, int, int | None] | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    cancelled: bool = False
    announced: bool = False
    process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self.ended is None

    @property
    def shell(self) -> str:
        """The command as it is typed in a shell."""
        return shlex.join(("smalti", *self.args))

    @property
    def share(self) -> float | None:
        """The share that is done, from 0 to 1; None if it is not known."""
        if self.progress is None or not self.progress[2]:
            return None
        return min(1.0, self.progress[1] / self.progress[2])

    def take(self, line: str) -> None:
        """A line of standard error: progress, or text."""
        if found := _PROGRESS.match(line):
            self.progress = found["what"], int(found["done"]), int(found["total"]) if found["total"] else None
        elif line.strip():
            self.lines.append(line)


class Jobs:
    """The jobs of this server. Those that run end with it."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def latest(self, **context: object) -> list[Job]:
        """The jobs with these values in their context, the latest first."""
        found = [job for job in self._jobs.values() if all(job.context.get(name) == value for name, value in context.items())]
        return found[::-1]

    def start(
        self,
        title: str,
        args: Sequence[str],
        *,
        template: str,
        then: Callable[[Job], None] | None = None,
        **context: object,
    ) -> Job:
        """Start a command. One that already runs with the same arguments is returned. `then` is called at its end."""
        for each in self._jobs.values():
            if each.running and each.args == tuple(args):
                return each
        job = Job(id=token_hex(8), title=title, args=tuple(args), template=template, context=context)
        self._jobs[job.id] = job
        for old in [each.id for each in self._jobs.values() if not each.running][: max(0, len(self._jobs) - _KEPT_JOBS)]:
            del self._jobs[old]
        task = asyncio.create_task(self._run(job, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def cancel(self, job: Job) -> None:
        """End a job and everything that it has started."""
        if job.running:
            job.cancelled = True
            if job.process is not None:
                with suppress(ProcessLookupError):
                    kill_tree(job.process.pid)

    async def _run(self, job: Job, then: Callable[[Job], None] | None) -> None:
        try:
            await self._follow(job)
            if then is not None:
                then(job)
        except OSError as error:
            job.lines.append(f"smalti: error: the command cannot be started: {error}")
        finally:
            if job.code is None:
                job.code = -1
            job.ended = time.time()

    async def _follow(self, job: Job) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command(job.args),
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            limit=_MOST_OUTPUT,
        )
        job.process = process
        try:
            output, _ = await asyncio.gather(process.stdout.read(), _lines(process, job))  # type: ignore[union-attr]
            job.code = await process.wait()
        finally:
            job.process = None
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    kill_tree(process.pid)
        with suppress(ValueError):
            job.result = load_json(output)


async def _lines(process: asyncio.subprocess.Process, job: Job) -> None:
    while line := await process.stderr.readline():  # type: ignore[union-attr]
        for piece in line.decode(errors="replace").rstrip("\n").split("\r"):
            job.take(piece)
