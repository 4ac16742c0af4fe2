"""What ranks on any kind of accelerator need to know of it, beyond what torch says alike of all."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def use_device(device: str) -> None:
    """Make a rank's accelerator the current one of this thread; a new thread begins with the first of the machine.

    Call it first in every thread of a rank that works on an accelerator. What goes back to "the device before" at its end would
    else go to the first one and open a context there: hundreds of megabytes, on a GPU that belongs to another rank.
    """
    place = torch.device(device)
    if place.type != "cpu" and place.index is not None:
        torch.accelerator.set_device_index(place.index)


@cache
def pins_memory(kind: str) -> bool:
    """Whether host memory can be pinned for copies from and to this kind of device; they then run beside computation.

    MPS shares the memory of the host and gains nothing by it. For others torch is asked: a plugin for a device may have none.
    """
    if kind in ("cpu", "mps"):
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor in host memory, on the device; the host does not wait until the device has done all that it was asked before."""
    place = torch.device(device)
    if not pins_memory(place.type):
        return tensor.to(place)
    return tensor.pin_memory().to(place, non_blocking=True)


def side_stream(device: str) -> torch.Stream | None:
    """A stream beside the current one; None where work is not queued (the CPU), or only in one queue (MPS)."""
    if torch.device(device).type == "cpu":
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None
