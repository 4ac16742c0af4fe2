"""Options of the run, its checkpoints, its metrics and the choice of plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from smalti.config.core_options.values import names_a_place
from smalti.config.options import Names, Options, option
from smalti.system import parse_bytes


def _or_none(value: object) -> object:
    """An empty text is how other trainers write "none"."""
    return "none" if value == "" else value


def _zero_is_none(value: object) -> object:
    """0 as no value: the other of two lengths decides."""
    return None if value in (0, "0") and not isinstance(value, bool) else value


def _size(text: str | None) -> str | None:
    """Raises ValueError for a text that is not a size."""
    if text is not None:
        parse_bytes(text)
    return text


def _wait_is_pause(value: object) -> object:
    """SimpleTuner's word for it."""
    return "pause" if value == "wait" else value


Length = Annotated[int | None, BeforeValidator(_zero_is_none)]


class RunOptions(Options):
    output_dir: Path | None = option(None, help="Run directory, shared by all nodes. The same command resumes the run in it.")
    seed: int = option(42, help="Seed of weights, data order, noise and timesteps.", ge=0)
    max_train_steps: Length = option(None, help="Optimizer steps, across resumes; without it, num_train_epochs decides.", ge=1)
    num_train_epochs: Length = option(
        None, help="Total epochs, across resumes. Ignored with --max_train_steps; 0 is the same as not given.", ge=1
    )
    resume_from_checkpoint: Annotated[str, BeforeValidator(_or_none), AfterValidator(names_a_place)] = option(
        "latest",
        help='Checkpoint to resume from: "latest", "best", "none", a step, or path or URL of a checkpoint or run directory.',
    )
    nonfinite_loss: Literal["stop", "skip"] = option(
        "stop",
        help="What to do when the loss is NaN or infinite on any rank: stop the run, or skip the step.",
        level="advanced",
    )


class CheckpointOptions(Options):
    checkpoint_step_interval: int = option(
        500, help="Save a checkpoint every N steps and at the end. 0: only at the end.", aliases=["checkpointing_steps"], ge=0
    )
    checkpoints_total_limit: int = option(
        5, help="Keep this many verified checkpoints. 0 keeps all.", aliases=["save_total_limit"], ge=0
    )
    checkpoint_async: bool = option(
        True,
        help="Write checkpoints in the background, from a copy in host memory.",
        level="advanced",
        tradeoff="training hardly pauses, pinned host memory for the state of the rank",
    )
    on_save_error: Literal["continue", "stop"] = option(
        "continue",
        help="What to do when a checkpoint cannot be written (disk full, no permission): continue and retry, or stop.",
        level="advanced",
    )
    disk_low: Annotated[str | None, AfterValidator(_size)] = option(
        None,
        help="Free space of output_dir below which on_disk_low applies, such as 5GiB. Default: it is not watched.",
        level="advanced",
        aliases=["disk_low_threshold"],
    )
    on_disk_low: Annotated[Literal["pause", "stop", "warn"], BeforeValidator(_wait_is_pause)] = option(
        "warn",
        help="What to do when output_dir is short of space. pause: no steps until there is room; stop: save and stop.",
        level="advanced",
        when="disk_low",
        aliases=["disk_low_action"],
    )


class TrackingOptions(Options):
    log_interval: int = option(1, help="Log metrics every N steps.", level="advanced", ge=1)


class PluginOptions(Options):
    plugins: Names = option((), help="Use only these plugins and what they need, with the built-in ones.", aliases=["plugin"])
    without: Names = option((), help='Disable these plugins without importing them. "all" keeps only the built-in ones.')
