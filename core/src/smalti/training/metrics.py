"""Numbers of a step on their way to the trackers. One that fails is switched off; the run continues."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins
from smalti.types import StepResult, World

_log = logging.getLogger(__name__)


def metrics_of(result: StepResult) -> dict[str, float]:
    """What is tracked of a step. Rates count all ranks; what is not known is left out."""
    seconds = result.seconds + result.data_seconds
    known = {
        "mfu": result.mfu,
        "peak_memory_mb": result.peak_memory_mb,
    }
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "samples_per_second": result.samples / seconds if seconds else 0.0,
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        **{name: value for name, value in known.items() if value is not None},
    }


def log_metrics(plugins: Plugins, world: World, metrics: Mapping[str, float], step: int) -> None:
    """Hand numbers to every tracker. Main rank only; a tracker's failure is reported once and disables it."""
    if not world.is_main:
        return
    for name in sorted(plugins.implementers(HookSpecs.log_metrics)):
        try:
            plugins.call_one(name, HookSpecs.log_metrics, metrics=metrics, step=step)
        except Exception as error:  # noqa: BLE001 - the isolation of trackers: whatever they raise, training continues
            plugins.disable(name, HookSpecs.log_metrics)
            source = plugins.infos[name].source
            _log.warning(
                "tracking by plugin %r (%s) is off from step %d on: %s: %s", name, source, step, type(error).__name__, error
            )
