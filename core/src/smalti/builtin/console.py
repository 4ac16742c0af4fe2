"""Progress of a run as text: a bar on a terminal, a line every few seconds elsewhere. `smalti run watch` shows the same.

rich is imported only on a terminal. It respects NO_COLOR.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TextIO

from smalti.hookspecs import hookimpl
from smalti.rundir import Phase, seconds_for
from smalti.system import counted, duration, format_bytes
from smalti.types import Checkpoint, EvaluationResult, RunInfo, RunState, StepResult, ValidationResult

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINE_SECONDS = 10.0


class Progress:
    """The progress of a run, as a display shows it. Times are seconds of any clock, as long as it is always the same one.

    `started` is when the run started, if that was before `now`.
    """

    def __init__(self, *, step: int, max_steps: int, now: float, started: float | None = None) -> None:
        self.step = step
        self.max_steps = max_steps
        self._last = StepResult(step=step, loss=math.nan, grad_norm=math.nan, learning_rate=0.0, samples=0, seconds=0.0)
        self._updated = now
        self._started = now if started is None else started

    def update(self, result: StepResult, now: float) -> None:
        """The run has completed a step. What is known on logged steps only is shown until the next one."""
        memory, mfu = result.peak_memory_mb, result.mfu
        self._last = replace(
            result,
            mfu=self._last.mfu if mfu is None else mfu,
            peak_memory_mb=self._last.peak_memory_mb if memory is None else memory,
        )
        self.step, self._updated = result.step, now

    def line(self) -> str:
        """Everything in one line, the most important first: a narrow terminal truncates the end."""
        last, rate = self._last, self._last.recent_samples_per_second
        eta = seconds_for(self.max_steps - self.step, last.samples, rate)
        width = len(str(self.max_steps))
        loss = last.loss if last.smoothed_loss is None else last.smoothed_loss
        return "  ".join(
            [
                f"step {self.step:>{width}}/{self.max_steps}",
                f"loss {loss:<7.4g}",
                f"eta {duration(eta)}",
                f"{speed(rate)} samples/s",
                f"lr {last.learning_rate:.2e}",
                *([] if last.mfu is None else [f"mfu {last.mfu:.1%}"]),
                *([] if last.peak_memory_mb is None else [f"{last.peak_memory_mb / 1024:.1f} GiB"]),
                f"elapsed {duration(self._updated - self._started)}",
            ]
        )


class PhaseProgress:
    """The progress of a phase without steps, at the time `now` in unix seconds, as a display shows it."""

    def __init__(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.step = phase.done or 0
        self.max_steps = phase.total or 1
        self._now = now

    def line(self) -> str:
        eta = self.phase.seconds_remaining(self._now)
        elapsed = f"elapsed {duration(self._now - self.phase.begun)}"
        return "  ".join([str(self.phase), *([] if eta is None else [f"eta {duration(eta)}"]), elapsed])


class Display(Protocol):
    """Shows the progress of one run."""

    def update(self, progress: Progress | PhaseProgress) -> None:
        """Called after every step and on any progress of a phase. The display decides how often it shows it."""
        ...

    def print(self, text: str) -> None:
        """Print a line permanently."""
        ...

    def close(self) -> None:
        """Show the latest progress if it was not shown yet, and restore the terminal."""
        ...


class LineDisplay:
    """Prints the first step, then one line every `seconds`, then the last step."""

    def __init__(self, stream: TextIO, seconds: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._seconds = seconds
        self._clock = clock
        self._due = -math.inf
        self._unshown: Progress | PhaseProgress | None = None
        self._shown = ""

    def update(self, progress: Progress | PhaseProgress) -> None:
        self._unshown = progress
        phase = progress.phase.name if isinstance(progress, PhaseProgress) else ""
        if self._clock() >= self._due or progress.step >= progress.max_steps or phase != self._shown:
            self._shown = phase
            self._show(progress)

    def print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._unshown:
            self._show(self._unshown)

    def _show(self, progress: Progress | PhaseProgress) -> None:
        self.print(progress.line())
        self._due = self._clock() + self._seconds
        self._unshown = None


class BarDisplay:
    """A bar at the bottom of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress as RichProgress, TextColumn

        self._bar: RichProgress = RichProgress(
            BarColumn(None),
            TextColumn("{task.description}", markup=False),
            console=Terminal(file=stream),
            expand=True,
            # Other output goes above the bar, if it goes to the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._bar.start()

    def update(self, progress: Progress | PhaseProgress) -> None:
        if not self._bar.tasks:
            self._bar.add_task("")
        self._bar.update(self._bar.task_ids[0], completed=progress.step, total=progress.max_steps, description=progress.line())

    def print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def open_display(stream: TextIO, seconds: float = LINE_SECONDS) -> Display:
    """A bar if `stream` is a terminal that can show one, else a line every `seconds`."""
    terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return BarDisplay(stream) if terminal else LineDisplay(stream, seconds)


def speed(samples_per_second: float | None) -> str:
    """The speed with three digits; "-" if it is unknown."""
    if samples_per_second is None:
        return "-"
    return f"{samples_per_second:.3g}" if samples_per_second < 1000 else f"{samples_per_second:,.0f}"


class Console:
    """Shows the progress of a run on standard error; on the main rank only."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._display: Display | None = None

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        if not info.world.is_main:
            return
        self._display = open_display(self._stream or sys.stderr)
        self._progress = Progress(step=state.step, max_steps=state.max_steps, now=time.monotonic())
        self._display.print(
            f"{info.family} on {info.strategy}, {counted(info.world.size, 'rank')}: "
            f"{info.trainable:,} of {counted(info.parameters, 'parameter')} trainable, "
            f"{counted(info.effective_batch, 'sample')} per step, steps {state.step} to {state.max_steps}"
        )
        self._display.print(f"timesteps: {info.timesteps}")

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if self._display is None:
            return
        self._progress.max_steps = state.max_steps
        self._progress.update(result, time.monotonic())
        self._display.update(self._progress)
        if result.skipped:
            reason = f"its loss was {result.loss}"
            if math.isfinite(result.loss):
                reason = f"its gradient norm was {result.grad_norm}"
            self._display.print(f"step {result.step + 1} was skipped: {reason}")

    @hookimpl
    def on_validation(self, result: ValidationResult) -> None:
        from smalti.rundir import overview

        if self._display is not None:
            of = f"of step {result.step}" if result.step else "of the model before training"
            self._display.print(f"{counted(len(result.images), 'image')} {of}: {overview(result.folder)}")

    @hookimpl
    def on_evaluation(self, result: EvaluationResult) -> None:
        if self._display is not None:
            of = "".join(f" times {name}" for name in result.factors) + f" over {counted(result.samples, 'held-out image')}"
            self._display.print(f"evaluation of step {result.step}: loss {result.loss:.4g}{of} ({result.seconds:.1f} s)")

    @hookimpl
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._display is not None:
            size = format_bytes(checkpoint.size)
            self._display.print(
                f"checkpoint of step {checkpoint.step}: {checkpoint.path} ({size} in {checkpoint.seconds:.1f} s)"
            )

    @hookimpl
    def on_error(self, state: RunState, error: BaseException) -> None:
        if self._display is not None:
            self._display.print(f"{type(error).__name__} after step {state.step}")

    @hookimpl
    def on_train_end(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


plugin = Console()
