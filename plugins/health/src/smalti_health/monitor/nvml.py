"""GPUs of NVIDIA, read with NVML. Every call may hang or fail; callers use a thread for each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from smalti_health.monitor.reader import Absent, GpuReader
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.policy.readings import Device, Reading

_LOST = (15, 16)
"""GPU is lost, GPU requires reset."""
_UNSUPPORTED = (2, 3, 4, 13, 25)
"""Invalid argument, not supported, no permission, function not found, argument version mismatch."""
_SLOW_EVERY = 6
"""Links and remapped rows are read once in this number of readings."""
_XID = 8


class NvmlGpu(GpuReader):
    """One GPU. Calls that the GPU or the driver does not support are made once."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        super().__init__()
        self._nvml, self._handle, self._uuid = nvml, handle, uuid
        self._unsupported: set[str] = set()
        self._failed: list[str] = []
        self._lost = 0
        self._polls = 0
        self._links: int | None = None
        fields = {name: getattr(nvml, f"NVML_FI_DEV_{name}", None) for name in _FIELDS}
        self._fields = {name: number for name, number in fields.items() if number is not None}

    def describe(self) -> Device:
        nvml, call = self._nvml, self._call
        index = call("Index", nvml.nvmlDeviceGetIndex)
        name = call("Name", nvml.nvmlDeviceGetName)
        limits = {
            key: call(f"TemperatureThreshold {key}", nvml.nvmlDeviceGetTemperatureThreshold, number)
            for key, number in (
                ("slowdown", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
                ("shutdown", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
                ("memory_max", nvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
            )
        }
        clock = call("MaxClockInfo", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
        return Device(uuid=self._uuid, index=index or 0, name=name or "", clock_max=clock, **limits)

    def read(self) -> Reading:
        nvml, call = self._nvml, self._call
        self._failed, self._lost = [], 0
        values = self._field_values()
        ecc = "TotalEccErrors", nvml.nvmlDeviceGetTotalEccErrors
        uncorrected, corrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        found = {
            "recovery_action": values.get("GET_GPU_RECOVERY_ACTION"),
            "memory_temperature": values.get("MEMORY_TEMP"),
            "nvlink_errors": values.get("NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
            "temperature": call("Temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "temperature_margin": call("MarginTemperature", nvml.nvmlDeviceGetMarginTemperature),
            "ecc_uncorrected": call(*ecc, uncorrected, nvml.NVML_VOLATILE_ECC),
            "ecc_corrected": call(*ecc, corrected, nvml.NVML_VOLATILE_ECC),
            "clock_reasons": call("CurrentClocksEventReasons", nvml.nvmlDeviceGetCurrentClocksEventReasons),
            "clock": call("ClockInfo", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        }
        memory = call("MemoryInfo", nvml.nvmlDeviceGetMemoryInfo)
        used = round(100 * memory.used / memory.total, 1) if memory is not None and memory.total else None
        if self._polls % _SLOW_EVERY == 0 or self._lost:
            found |= self._slow()
        self._polls += 1
        return Reading(
            uuid=self._uuid,
            time=time.time(),
            lost=self._lost >= 2,
            memory_used_percent=used,
            failed=tuple(dict.fromkeys(self._failed)),
            **found,
        )

    def _slow(self) -> dict[str, Any]:
        nvml, call = self._nvml, self._call
        rows = call("RemappedRows", nvml.nvmlDeviceGetRemappedRows)
        return {
            "nvlinks": self._active_links(),
            "remap_pending": rows[2] if rows is not None else None,
            "remap_failed": rows[3] if rows is not None else None,
            "pcie_width": call("CurrPcieLinkWidth", nvml.nvmlDeviceGetCurrPcieLinkWidth),
            "pcie_generation": call("CurrPcieLinkGeneration", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        }

    def _active_links(self) -> int | None:
        """A bit for each active link; None if one that was read before cannot be read now."""
        nvml, links, readable = self._nvml, 0, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            name = f"NvLinkState {link}"
            state = self._call(name, nvml.nvmlDeviceGetNvLinkState, link)
            if state is None and name not in self._unsupported:
                return None
            readable += state is not None
            links |= (state == 1) << link
        return links if readable else None

    def _field_values(self) -> dict[str, int]:
        nvml, names = self._nvml, list(self._fields)
        if not names:
            return {}
        values = self._call("FieldValues", nvml.nvmlDeviceGetFieldValues, [self._fields[name] for name in names])
        found = {}
        for name, value in zip(names, values or (), strict=False):
            if value.nvmlReturn in _LOST:
                self._lost += 1
            elif value.nvmlReturn == 0:
                found[name] = _number(value)
            elif value.nvmlReturn in _UNSUPPORTED:
                self._fields.pop(name)
        return found

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in self._unsupported:
            return None
        self.begin(name)
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in _LOST:
                self._lost += 1
            elif error.value in _UNSUPPORTED:
                self._unsupported.add(name)
            else:
                self._failed.append(f"{name}: {error}")
            return None
        finally:
            self.end()


_FIELDS = ("GET_GPU_RECOVERY_ACTION", "MEMORY_TEMP", "NVLINK_REPLAY_ERROR_COUNT_TOTAL")


def _number(value: Any) -> int:
    """The number of a field, by NVML's value type."""
    by_type = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    return int(getattr(value.value, by_type.get(value.valueType, "uiVal")))


class Nvml:
    """The driver. All GPUs are found through it; calls may hang."""

    vendor = "NVML"

    def __init__(self) -> None:
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError as error:
            raise Absent("the package nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise Absent(f"{error}") from error

    def find(self, request: DeviceRequest) -> str | None:
        """The UUID of the GPU that a rank uses, of the whole one where it uses a part (MIG); None if there is none."""
        nvml = self._nvml
        for name in request.names():
            try:
                if name.isdecimal():
                    handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
                elif name.startswith("MIG-"):
                    handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(name.encode()))
                else:
                    return self._beginning_with(name)
                return str(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError:
                continue
        return None

    def all(self) -> list[str]:
        """The UUIDs of all GPUs, without those that do not answer."""
        nvml, found = self._nvml, []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))))
            except nvml.NVMLError:
                continue
        return found

    def gpu(self, uuid: str) -> NvmlGpu:
        return NvmlGpu(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode()), uuid)

    def watch(self, uuid: str) -> Any:
        """What `wait` takes to return the XIDs of this GPU from now on. Raises Absent where the driver has no events."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByUUID(uuid.encode()), _XID, events)
        except nvml.NVMLError as error:
            raise Absent(f"XID errors: {error}") from error
        return events

    def wait(self, events: Any, seconds: float) -> int | None:
        """The next XID, or None after this time. Raises Absent if the driver has no more."""
        nvml = self._nvml
        try:
            return int(nvml.nvmlEventSetWait_v2(events, int(1000 * seconds)).eventData)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise Absent(f"XID errors: {error}") from error

    def _beginning_with(self, name: str) -> str | None:
        """CUDA accepts the beginning of a UUID too."""
        found = [uuid for uuid in self.all() if uuid.startswith(name)]
        return found[0] if len(found) == 1 else None
