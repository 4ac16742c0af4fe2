"""GPUs of AMD, read with the package amdsmi where ROCm has installed it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from typing import Any

from smalti_health.monitor.reader import Absent, GpuReader
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.policy.readings import Device, Reading

_UNSUPPORTED = (1, 2, 3, 10, 55)
"""Invalid argument, not supported, not yet implemented, no permission, setting unavailable."""


class AmdGpu(GpuReader):
    """One GPU. What the GPU does not support is asked for once."""

    def __init__(self, smi: Any, handle: Any, uuid: str, index: int) -> None:
        super().__init__()
        self._smi, self._handle, self._uuid, self._index = smi, handle, uuid, index
        self._unsupported: set[str] = set()
        self._failed: list[str] = []

    def describe(self) -> Device:
        smi = self._smi
        kinds, metrics = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric
        info = self._call("asic_info", smi.amdsmi_get_gpu_asic_info)
        limits = {
            name: self._call(f"temperature {name}", smi.amdsmi_get_temp_metric, kind, metric)
            for name, kind, metric in (
                ("slowdown", kinds.HOTSPOT, metrics.CRITICAL),
                ("shutdown", kinds.HOTSPOT, metrics.EMERGENCY),
                ("memory_max", kinds.VRAM, metrics.CRITICAL),
            )
        }
        name = str(info.get("market_name", "")) if isinstance(info, dict) else ""
        return Device(uuid=self._uuid, index=self._index, name=name, **{key: value or None for key, value in limits.items()})

    def read(self) -> Reading:
        smi, self._failed = self._smi, []
        kinds, current = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
        ecc = self._call("total_ecc_count", smi.amdsmi_get_gpu_total_ecc_count)
        used = self._call("memory_usage", smi.amdsmi_get_gpu_memory_usage, smi.AmdSmiMemoryType.VRAM)
        total = self._call("memory_total", smi.amdsmi_get_gpu_memory_total, smi.AmdSmiMemoryType.VRAM)
        return Reading(
            uuid=self._uuid,
            time=time.time(),
            temperature=self._call("temperature", smi.amdsmi_get_temp_metric, kinds.HOTSPOT, current),
            memory_temperature=self._call("memory temperature", smi.amdsmi_get_temp_metric, kinds.VRAM, current),
            ecc_corrected=ecc.get("correctable_count") if isinstance(ecc, dict) else None,
            ecc_uncorrected=ecc.get("uncorrectable_count") if isinstance(ecc, dict) else None,
            memory_used_percent=round(100 * used / total, 1) if used is not None and total else None,
            failed=tuple(self._failed),
        )

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in self._unsupported:
            return None
        self.begin(name)
        try:
            return function(self._handle, *arguments)
        except Exception as error:  # noqa: BLE001 - the package also raises KeyError for codes that it does not know
            code = error.get_error_code() if hasattr(error, "get_error_code") else None
            if code in _UNSUPPORTED:
                self._unsupported.add(name)
            else:
                self._failed.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            return None
        finally:
            self.end()


class AmdSmi:
    """The driver."""

    vendor = "AMD SMI"

    def __init__(self) -> None:
        with _quiet():
            try:
                import amdsmi  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise Absent("the package amdsmi is not installed") from error
            except Exception as error:
                raise Absent(f"the package amdsmi finds no driver: {type(error).__name__}: {error}") from error
            try:
                amdsmi.amdsmi_init()
                self._handles = {
                    str(amdsmi.amdsmi_get_gpu_device_uuid(each)): each for each in amdsmi.amdsmi_get_processor_handles()
                }
            except Exception as error:
                raise Absent(f"{error}") from error
        self._smi: Any = amdsmi
        if not self._handles:
            raise Absent("it knows no GPU")

    def find(self, request: DeviceRequest) -> str | None:
        """By index in the driver's order; torch's UUIDs of these GPUs have another form."""
        for name in request.names():
            if name.isdecimal() and int(name) < len(self._handles):
                return list(self._handles)[int(name)]
            for uuid in self._handles:
                if name.removeprefix("GPU-").lower() in uuid.lower():
                    return uuid
        return (
            list(self._handles)[request.ordinal] if request.visible is None and request.ordinal < len(self._handles) else None
        )

    def all(self) -> list[str]:
        return list(self._handles)

    def gpu(self, uuid: str) -> AmdGpu:
        return AmdGpu(self._smi, self._handles[uuid], uuid, list(self._handles).index(uuid))

    def watch(self, uuid: str) -> Any:
        raise Absent("AMD SMI has no XIDs")

    def wait(self, events: Any, seconds: float) -> int | None:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the package and its library print, also from C."""
    kept = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        with redirect_stdout(StringIO()):
            yield
    finally:
        os.dup2(kept, 1)
        for descriptor in (kept, nothing):
            with suppress(OSError):
                os.close(descriptor)
