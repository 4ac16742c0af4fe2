"""Which GPU a rank uses, as the rank itself knows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """`ordinal` is the N of "cuda:N" or "xpu:N", `visible` the value of CUDA_VISIBLE_DEVICES, None where it is not set.

    `uuid` is what torch has read from the device, without the prefix "GPU-" or "MIG-"; "" if it does not know.
    """

    rank: int
    ordinal: int
    visible: str | None = None
    uuid: str = ""

    def names(self) -> tuple[str, ...]:
        """How the driver may know the device: UUIDs or their beginnings, or an index as text, the most certain first."""
        if self.uuid:
            return (f"GPU-{self.uuid}", f"MIG-{self.uuid}")
        if self.visible is None:
            return (str(self.ordinal),)
        entries = [entry.strip() for entry in self.visible.split(",")]
        return (entries[self.ordinal],) if 0 <= self.ordinal < len(entries) and entries[self.ordinal] else ()


def device_request(rank: int, device: str, environment: Mapping[str, str] = os.environ) -> DeviceRequest | None:
    """The GPU behind a torch device; None for the CPU."""
    kind, _, ordinal = device.partition(":")
    if kind not in ("cuda", "xpu"):
        return None
    number, visible = int(ordinal or 0), None
    if kind == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("HIP_VISIBLE_DEVICES"))
    return DeviceRequest(rank=rank, ordinal=number, visible=visible, uuid=_uuid(kind, number))


def _uuid(kind: str, ordinal: int) -> str:
    """What torch knows, where it is loaded and has the device."""
    module = getattr(sys.modules.get("torch"), kind, None)
    if module is None or not module.is_available():
        return ""
    try:
        return str(getattr(module.get_device_properties(ordinal), "uuid", ""))
    except RuntimeError:
        return ""
