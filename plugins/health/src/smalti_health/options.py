"""The options `--gpu_health` and its like. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option
from smalti_health.policy.limits import Limits

_LIMITS = Limits()


class HealthOptions(Options):
    gpu_health: Literal["stop", "warn", "off"] = option(
        "stop",
        help="What a faulty GPU does to the run: stop it after a checkpoint, only warn, or do not watch GPUs.",
    )
    gpu_health_interval: float = option(
        5.0, help="Seconds between two readings of each GPU. XID errors are noticed at once.", ge=0.05, level="advanced"
    )
    gpu_health_timeout: float = option(
        10.0, help="Seconds after which a call to the driver counts as unanswered. It is a warning.", gt=0, level="advanced"
    )
    gpu_health_ecc_errors: int = option(
        _LIMITS.ecc_errors, help="New uncorrectable ECC errors at which the run stops.", ge=1, level="advanced"
    )
    gpu_health_temperature_margin: float = option(
        _LIMITS.temperature_margin,
        help="Degrees Celsius below its own slowdown threshold from which on a GPU is hot.",
        level="advanced",
    )
    gpu_health_temperature_seconds: float = option(
        _LIMITS.temperature_seconds, help="Seconds after which a hot GPU stops the run.", gt=0, level="advanced"
    )
    gpu_health_slowdown_share: float = option(
        _LIMITS.slowdown_share,
        help="Share of the last 10 minutes in which hardware slowed the clocks down, from which it is reported.",
        gt=0,
        le=1,
        level="advanced",
    )
    gpu_health_slowdown_clock: float = option(
        _LIMITS.slowdown_clock,
        help="Share of the largest clock below which such a slowdown stops the run. 0 disables it.",
        ge=0,
        le=1,
        level="advanced",
    )
    gpu_health_port: int = option(
        0,
        help="Port on 127.0.0.1 at which the first node serves its readings to Prometheus. 0 disables it.",
        ge=0,
        le=65535,
        level="advanced",
    )

    check_before_step: bool | None = option(
        None,
        help="Wait for loss and gradient norm before any weight changes. Default: off on CUDA with adamw, in one process or "
        "with FSDP2.",
        level="advanced",
        tradeoff="on: the device is idle for a moment in each step; off: it leaves out steps that are not finite",
    )

    def limits(self) -> Limits:
        """The thresholds of the policy."""
        return Limits(
            ecc_errors=self.gpu_health_ecc_errors,
            temperature_margin=self.gpu_health_temperature_margin,
            temperature_seconds=self.gpu_health_temperature_seconds,
            slowdown_share=self.gpu_health_slowdown_share,
            slowdown_clock=self.gpu_health_slowdown_clock,
        )


GROUP = OptionGroup(name="gpu_health", title="GPU health", options=HealthOptions)
