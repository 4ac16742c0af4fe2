"""How well a run uses its devices: the share of their peak that its steps make use of, and the memory that they need.

The peaks are those of dense matrix products, without sparsity, as the vendors give them: NVIDIA's data sheets of H100, H200,
A100, L40S, L40, L4, A10, A40 and HGX B200 (halved where a sheet counts sparsity), the appendices of its white papers on Ada and
Ampere GA102 for GeForce (accumulating in fp32, as training does, which is half as fast there), AMD's data sheet of the MI300X.
"""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass, field

import torch

from smalti.models import ModelFamily
from smalti.parallel import Products
from smalti.types import StepResult, World

_log = logging.getLogger(__name__)

PEAKS: tuple[tuple[str, float, float, float], ...] = (
    (r"H100 (64|80|96)GB HBM[23]e?|H100 SXM.*|H200|H200 SXM.*|GH200 .*", 989.4, 494.7, 66.9),
    (r"H100 PCIe", 756.0, 378.0, 51.2),
    (r"H100 NVL|H200 NVL", 835.0, 417.5, 60.0),
    (r"B200", 2250.0, 1125.0, 75.0),
    (r"A100[- ].*", 312.0, 156.0, 19.5),
    (r"A10", 125.0, 62.5, 31.2),
    (r"A40", 149.7, 74.8, 37.4),
    (r"L40S", 362.0, 183.0, 91.6),
    (r"L40", 181.0, 90.5, 90.5),
    (r"L4", 121.0, 60.0, 30.3),
    (r"GeForce RTX 3090", 71.0, 35.6, 35.6),
    (r"GeForce RTX 4090", 165.2, 82.6, 82.6),
    (r"Instinct MI300X.*", 1307.4, 653.7, 163.4),
)
"""The device's name without its maker, as a pattern for all of it, and its peaks in TFLOP/s: bf16, TF32, fp32."""


def known_peak(device_name: str, products: Products) -> float | None:
    """FLOP/s that a device can make at most of such products, by its name as torch gives it; None where that is not known.

    A slice of a device (MIG) and a mobile one have other names than the whole and the large one, and are not known.
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", device_name)
    for pattern, bf16, tf32, fp32 in PEAKS:
        if re.fullmatch(pattern, name) and " MIG " not in name:
            return 1e12 * {"bf16": bf16, "tf32": tf32, "fp32": fp32}[products]
    return None


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


def peak_of(world: World, given: float | None, products: Products) -> float | None:
    """FLOP/s of all devices of a run at most: as `given` for one in TFLOP/s, or by this rank's device; None if not known."""
    if given is not None:
        return given * 1e12 * world.size
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
