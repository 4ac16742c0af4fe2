"""How well a run uses its devices: the fraction of their peak that its steps use, and the memory that they need."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field

import torch

from smalti.models import ModelFamily
from smalti.parallel import Products, device_model_of
from smalti.types import StepResult, World

_log = logging.getLogger(__name__)


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
