"""The events and their payloads, which are those of SimpleTuner with a few more keys. Pure functions of what hooks are given.

Each has `type`, `severity`, `job_id`, `title`, `message`, `timestamp`, and `source`: the run, and which process sent it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from smalti import Checkpoint, ExitCode, GpuFault, Outcome, RunState, StepResult, StopReason, UserError, ValidationResult
from smalti_health.webhooks.delivery.outbox import Event

LONGEST_MESSAGE = 1000
LONGEST_PROMPT = 200
MOST_IMAGES = 16
_GPU = (
    *("index", "name", "temperature_celsius", "ecc_errors_single", "ecc_errors_double", "throttle_reasons"),
    "memory_used_percent",
)
_BAD = (StopReason.ERROR_BUDGET, StopReason.DISK_LOW, StopReason.SAVE_FAILED, StopReason.NON_FINITE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is the same in all events of a process. `mask` replaces what must not leave it."""

    run: str
    directory: Path
    job_id: str
    host: str
    node: int = 0
    rank: int = 0
    mask: Callable[[str], str] = str

    def event(
        self,
        type: str,
        level: str,
        title: str,
        message: str,
        *,
        now: float,
        critical: bool = False,
        **blocks: object,
    ) -> Event:
        """An event with a new id. `blocks` are added to the payload."""
        message = _shortened(self.mask(message), LONGEST_MESSAGE)
        payload = {
            "type": type,
            "severity": level,
            "job_id": self.job_id,
            "title": title,
            "message": message,
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
            "source": {"run": self.run, "host": self.host, "node": self.node, "rank": self.rank},
            **{name: self._plain(each) for name, each in blocks.items()},
        }
        where = f" on {self.host}, rank {self.rank}" if level in ("error", "critical", "warning") else ""
        text = f"**{title}** ({self.run}{where})\n{message}"
        return Event(
            id=f"msg_{uuid.uuid4().hex}", type=type, level=level, time=now, payload=payload, text=text, critical=critical
        )

    def _plain(self, value: object) -> object:
        """In JSON's types, masked. What is no number is null."""
        if isinstance(value, Mapping):
            return {str(key): self._plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(each) for each in value]
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if value is None or isinstance(value, bool | int):
            return value
        return self.mask(str(value))


def gpu_fault(source: Source, state: RunState, fault: GpuFault, now: float) -> Event:
    """A fault of an accelerator. What the monitor did not read is null."""
    severity = fault.severity
    reading = fault.reading
    gpu = {name: reading.get(name) for name in _GPU}
    used = gpu["memory_used_percent"]
    gpu["memory_used_percent"] = round(used, 1) if isinstance(used, float) and math.isfinite(used) else used
    gpu["throttle_reasons"] = list(reading.get("throttle_reasons") or ())  # type: ignore[call-overload]
    return source.event(
        "gpu.fault",
        severity,
        f"GPU Fault: {fault.kind}",
        f"{fault.device}, step {state.step}: {fault.message}",
        now=now,
        critical=True,
        fault={
            "type": fault.kind,
            "gpu": {**gpu, **{name: each for name, each in reading.items() if name not in gpu}, "device": fault.device},
            "action_taken": "circuit_opened" if severity == "critical" else "reported",
            "exception_type": reading.get("exception_type"),
            "step": state.step,
            "rank": fault.rank,
            "memory_suspect": fault.memory,
        },
    )


def stage(source: Source, state: RunState, key: str, status: str, label: str, message: str, now: float) -> Event:
    """A stage of the run begins or ends: `status` is running, completed, stopped or failed. An end is critical."""
    ended = status != "running"
    level = "error" if status == "failed" else "warning" if status == "stopped" else "info"
    percent = round(100 * state.step / state.max_steps, 1) if state.max_steps else None
    return source.event(
        "lifecycle.stage",
        level,
        label,
        message,
        now=now,
        critical=ended,
        stage={
            "key": key,
            "label": label,
            "status": status,
            "progress": {"percent": percent, "current": state.step, "total": state.max_steps},
        },
    )


def run_end(
    source: Source, state: RunState, key: str, outcome: Outcome | None, error: BaseException | None, now: float
) -> Event:
    """The end of the run, in stage `key`: with an outcome, or by an exception."""
    if outcome is None:
        stopped = isinstance(error, KeyboardInterrupt)
        message = f"stopped while {key}" if stopped else _described(error) if error else "it ended without an outcome"
        return _end(source, state, key, "stopped" if stopped else "failed", message, now)
    if outcome.reason is StopReason.COMPLETED:
        return _end(source, state, key, "completed", outcome.message, now)
    failed = outcome.reason in _BAD or outcome.exit_code is ExitCode.GPU_FAULT
    return _end(source, state, key, "failed" if failed else "stopped", outcome.message, now)


def _end(source: Source, state: RunState, key: str, status: str, message: str, now: float) -> Event:
    return stage(source, state, key, status, f"Run {status}", message, now)


def checkpoint(source: Source, state: RunState, saved: Checkpoint, now: float) -> Event:
    return source.event(
        "training.checkpoint",
        "info",
        "Checkpoint saved",
        f"step {saved.step} of {state.max_steps}",
        now=now,
        checkpoint={
            "path": saved.path.absolute(),
            "label": f"step {saved.step}",
            "is_final": saved.step >= state.max_steps,
            "step": saved.step,
            "bytes": saved.size,
            "seconds": round(saved.seconds, 3),
        },
    )


def checkpoint_failed(source: Source, state: RunState, error: UserError, now: float) -> Event:
    message = f"step {state.step} is not saved: {error.message}"
    return source.event("error", "error", "Checkpoint not saved", message, now=now, critical=True, error=_error(state, error))


def validation(source: Source, result: ValidationResult, now: float) -> Event:
    """The images that were generated: at most `MOST_IMAGES` of them are listed."""
    images = [
        {"prompt": _shortened(image.prompt, LONGEST_PROMPT), "seed": image.seed, "path": image.path.absolute()}
        for image in result.images[:MOST_IMAGES]
    ]
    return source.event(
        "training.validation",
        "info",
        "Validation images",
        f"step {result.step}: {len(result.images)} images in {result.folder}",
        now=now,
        validation={"step": result.step, "folder": result.folder.absolute(), "count": len(result.images), "images": images},
    )


def failure(source: Source, state: RunState, error: BaseException, now: float) -> Event:
    """An exception that ends the run on this rank."""
    message = f"step {state.step}: {_described(error)}"
    return source.event("error", "error", "Error", message, now=now, critical=True, error=_error(state, error))


def lost(source: Source, now: float) -> Event:
    """The process of this rank has ended without reporting why: killed, or ended by a library."""
    message = f"rank {source.rank} on {source.host} was killed, or ended without reporting why"
    error = {"exception_type": None, "message": message, "step": None}
    return source.event("error", "error", "Rank lost", message, now=now, critical=True, error=error)


def warning(source: Source, state: RunState, message: str, now: float) -> Event:
    """Something failed that the run continues without."""
    return source.event("notification", "warning", "Warning", f"step {state.step}: {message}", now=now)


def progress(source: Source, state: RunState, result: StepResult, now: float) -> Event:
    speed = result.recent_samples_per_second
    left = (state.max_steps - result.step) * result.samples
    loss = result.loss if result.smoothed_loss is None else result.smoothed_loss
    return source.event(
        "training.progress",
        "info",
        "Training",
        f"step {result.step} of {state.max_steps}, loss {loss:.4g}",
        now=now,
        progress={
            "step": result.step,
            "total_steps": state.max_steps,
            "percent": round(100 * result.step / state.max_steps, 1) if state.max_steps else None,
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "samples_per_second": speed,
            "seconds_remaining": round(left / speed) if speed else None,
        },
    )


def _described(error: BaseException) -> str:
    if isinstance(error, UserError):
        return f"{error.message}; fix: {error.fix}" if error.fix else error.message
    return f"{type(error).__name__}: {error}"


def _error(state: RunState, error: BaseException) -> dict[str, object]:
    text = error.message if isinstance(error, UserError) else str(error)
    return {"exception_type": type(error).__name__, "message": _shortened(text, LONGEST_MESSAGE), "step": state.step}


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."
