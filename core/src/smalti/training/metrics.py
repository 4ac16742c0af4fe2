"""Numbers of a step: those that go to trackers, how well devices are used, and running statistics of a model's activations.

A tracker that fails is switched off; the run continues.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smalti.hookspecs import HookSpecs
from smalti.models import ModelFamily
from smalti.parallel import Parallel, Products, device_model_of
from smalti.plugins import Plugins
from smalti.types import StepResult, World

_log = logging.getLogger(__name__)


def metrics_of(result: StepResult) -> dict[str, float]:
    """What is tracked of a step. Rates count all ranks; what is not known is left out."""
    seconds = result.seconds + result.data_seconds
    known = {"mfu": result.mfu, "peak_memory_mb": result.peak_memory_mb}
    return {
        "loss": result.loss,
        **{f"loss/{name}": loss for name, loss in (result.parts or {}).items()},
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


def known_peak(device_name: str, products: Products) -> float | None:
    """FLOP/s that a device can make at most of such products, by its name as torch gives it; None where that is not known."""
    model = device_model_of(device_name)
    return None if model is None else model.peaks[products]


@dataclass(kw_only=True)
class Utilisation:
    """Model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B) of a run's steps. For the main rank.

    A sample costs a forward pass, and as much again for the gradients of activations, and for those of the weights as much as
    the share of the parameters that train: three forward passes when all do, hardly more than two for an adapter. What is
    computed twice to save memory is not counted, nor what frozen encoders compute.

    Args:
        family: counts the forward pass; once for every image size, when the first of that size comes.
        trained: share of the parameters that train.
        peak: FLOP/s that all devices together can make; None where that is not known.
    """

    family: ModelFamily
    trained: float
    peak: float | None
    _counted: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _failed: bool = field(default=False, init=False)

    def of(self, result: StepResult, width: int, height: int) -> float | None:
        """The fraction of the peak that a step on images of this size used; None where it is not known."""
        seconds = result.seconds + result.data_seconds
        if self.peak is None or not seconds or (forward := self._forward(width, height)) is None:
            return None
        return result.samples * forward * (2 + self.trained) / seconds / self.peak

    def _forward(self, width: int, height: int) -> int | None:
        """FLOPs of one sample; None, reported once, if the family cannot count them."""
        if (width, height) not in self._counted and not self._failed:
            try:
                self._counted[width, height] = self.family.flops_per_sample(width, height)
            except NotImplementedError as error:
                self._failed = True
                _log.warning("no model FLOPs utilisation: %s cannot count its work: %s", self.family.name, error)
        return self._counted.get((width, height))


def peak_of(world: World, products: Products) -> float | None:
    """FLOP/s of all devices of a run at most, by this rank's device; None if not known."""
    if torch.device(world.device).type != "cuda":
        return None
    one = known_peak(torch.cuda.get_device_name(world.device), products)
    return None if one is None else one * world.size


class Memory:
    """The most memory that this rank needed: on an accelerator in tensors, since it was last asked; else the whole process."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._counts_tensors = self._device.type in ("cuda", "xpu")
        if self._counts_tensors:
            torch.accelerator.reset_peak_memory_stats(self._device)

    def peak_mb(self) -> float | None:
        """In MiB; None where it cannot be known."""
        if self._counts_tensors:
            peak = torch.accelerator.max_memory_allocated(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
            return float(peak) / 2**20
        if self._device.type == "cpu" and sys.platform != "win32":
            from resource import RUSAGE_SELF, getrusage

            # The kernel of macOS counts bytes, that of Linux units of 1024.
            return getrusage(RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        return None


@torch.no_grad()
def broadcast_running_stats(model: nn.Module, parallel: Parallel) -> None:
    """Give every rank the running statistics of rank 0, those of the model that is saved and judged. *Collective*.

    They depend on no other rank, so a run that resumes from them on all ranks continues as one that was not interrupted.
    """
    for module in model.modules():
        if getattr(module, "track_running_stats", False):
            for buffer in module.buffers(recurse=False):
                buffer.copy_(parallel.gather(buffer)[0])
