"""The device model of this node: from the table where its accelerator is known, else measured. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import psutil

from smalti import UserError
from smalti.parallel import DeviceModel, device_model_of, device_models
from smalti_doctor.child import run_in_child

_MEASURING = 2.0
_LIMIT = 120.0
"""Seconds after which a device counts as one that hangs."""
_NETWORK = 1.2e9
"""Bytes per second between nodes, assumed for devices that are in no table."""
_PROBE = "smalti_plan.probe"


def named_device(name: str, ranks: int) -> DeviceModel:
    """The device of this name: one of the table, "detected" for this node's accelerator, "cpu" for its processors.

    A device that is in no table is measured for two seconds. `ranks` share the memory and the processors of this node if
    they train on the CPU. Raises UserError with the known names.
    """
    known = device_models()
    if name in known:
        return known[name]
    names = f"--gpu=NAME: {', '.join(known)}; or --gpu=cpu"
    if name not in ("detected", "cpu"):
        raise UserError(f"the device {name!r} is unknown", fix=names)
    if name == "cpu":
        return _measured(ranks, on_cpu=True)
    found = detected(ranks)
    if found is None:
        raise UserError("this node has no accelerator, and no device is named", fix=names)
    return found[0]


def detected(ranks: int) -> tuple[DeviceModel, int] | None:
    """This node's accelerator and the bytes of it that are free; None if there is none. Raises UserError as `named_device`."""
    found = _probed()
    if not found:
        return None
    model = device_model_of(str(found["name"]))
    memory, free = (int(cast(int, found[name])) for name in ("memory", "free"))
    return _measured(ranks, on_cpu=False) if model is None else replace(model, memory=memory), free


def device_name() -> str:
    """The name of this node's accelerator, or "cpu". Raises UserError for a driver that hangs or fails."""
    return str(_probed().get("name", "cpu"))


def _probed() -> Mapping[str, object]:
    """Name and memory of the first accelerator; empty if there is none. Raises UserError for a driver that hangs or fails."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.current_accelerator() is None:
        return {}  # a build without accelerators: there is no driver to ask, and a process would take seconds
    child = run_in_child(_PROBE, seconds=_LIMIT)
    if child.state != "done":
        raise UserError(f"the accelerator cannot be asked for its name: {child.error}", fix="smalti doctor; or name a device")
    return child.values


def _measured(ranks: int, *, on_cpu: bool) -> DeviceModel:
    environment = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if on_cpu else None
    child = run_in_child("smalti_doctor.measure", ["0", str(_MEASURING)], seconds=_LIMIT, environment=environment)
    if child.state != "done":
        raise UserError(f"the device cannot be measured: {child.error}", fix="smalti doctor; or name a device of the table")
    values = child.values
    products = {name: float(rate) for name, rate in cast(Mapping[str, float], values["products"]).items()}
    share = ranks if on_cpu else 1
    fp32 = products["fp32"]
    memory = psutil.virtual_memory().total if on_cpu else int(cast(int, _probed()["memory"]))
    inner = float(cast(float, values["memory"])) / share
    host = float(cast(float, values["to_device"])) if values.get("to_device") else inner
    return DeviceModel(
        name="cpu" if on_cpu else "detected",
        title=str(values["name"]),
        kind=str(values["kind"]),
        memory=memory // share,
        peaks={each: products.get(each, fp32) / share for each in ("bf16", "tf32", "fp32")},
        memory_bandwidth=inner,
        link_bandwidth=min(inner, host) / 2,
        host_bandwidth=host,
        network_bandwidth=_NETWORK,
    )
