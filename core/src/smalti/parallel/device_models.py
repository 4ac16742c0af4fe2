"""Device models: the memory, peaks and bandwidths of accelerators, by name. The table is `device_models.toml` beside this file.

Importing this module imports no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """What one kind of device can do at most.

    `memory` is in bytes: the total that torch reports. `peaks` are in FLOP/s of dense matrix products, by their precision:
    "bf16", "tf32", "fp32". Bandwidths are in bytes per second, in one direction: of the device's own memory, to all other
    devices of the node, to host memory, and for each device to other nodes. `match` is a regular expression for the whole name
    of such a device in torch, without the maker.
    """

    name: str
    title: str
    memory: int
    peaks: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    match: str = ""
    kind: str = field(default="cuda")
    """As torch calls it: "cuda" for AMD too, "cpu" for host processors."""
    capability: tuple[int, int] | None = None
    """The compute capability that torch reports; None for devices without one."""


@cache
def device_models() -> Mapping[str, DeviceModel]:
    """The models of the table, by name."""
    text = files("smalti.parallel").joinpath("device_models.toml").read_text(encoding="utf-8")
    return {name: _model(name, entry) for name, entry in tomllib.loads(text).items()}


def device_model_of(device_name: str) -> DeviceModel | None:
    """The model of a device, by its name as torch gives it; None if it is unknown.

    A slice of a device (MIG) and a mobile one have other names than the whole and the large one, and are unknown.
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", device_name)
    if " MIG " in name:
        return None
    return next((model for model in device_models().values() if re.fullmatch(model.match, name)), None)


def _model(name: str, entry: Mapping[str, Any]) -> DeviceModel:
    major, minor = entry["capability"]
    return DeviceModel(
        name=name,
        title=entry["title"],
        match=entry["match"],
        memory=int(entry["memory_gib"] * 2**30),
        peaks={precision: 1e12 * value for precision, value in entry["peaks"].items()},
        capability=(major, minor),
        **{key: 1e9 * value for key, value in entry.items() if key.endswith("_bandwidth")},
    )
