"""The readings for Prometheus, on 127.0.0.1. Needs the package prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from smalti_health.policy.readings import Device, Reading

_METRICS = (
    ("temperature_celsius", "temperature", "Temperature of the GPU"),
    ("memory_temperature_celsius", "memory_temperature", "Temperature of its memory"),
    ("ecc_uncorrected", "ecc_uncorrected", "Uncorrectable ECC errors since the driver was loaded"),
    ("ecc_corrected", "ecc_corrected", "Correctable ECC errors since the driver was loaded"),
    ("clock_event_reasons", "clock_reasons", "Clock event reasons, a bit mask"),
    ("sm_clock_mhz", "clock", "Clock of the multiprocessors"),
    ("memory_used_percent", "memory_used_percent", "Share of the memory in use"),
    ("recovery_action", "recovery_action", "Recovery action, NVML's field 230"),
    ("lost", "lost", "1 if the driver cannot reach the GPU"),
)


def serve(port: int, latest: Mapping[str, tuple[Device, Reading]]) -> None:
    """Serve `latest`, which changes, in threads. Raises OSError, or ImportError without the package."""
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            for name, attribute, what in _METRICS:
                family = GaugeMetricFamily(f"smalti_gpu_{name}", what, labels=("uuid", "index", "name"))
                for device, reading in list(latest.values()):
                    if (value := getattr(reading, attribute)) is not None:
                        family.add_metric((device.uuid, str(device.index), device.name), float(value))
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type,unused-ignore]
    start_http_server(port, addr="127.0.0.1", registry=registry)
