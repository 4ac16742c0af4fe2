"""The thresholds of the policy. Each option `--gpu_health_...` sets one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Defaults for datacenter GPUs. Seconds, degrees Celsius, and shares between 0 and 1.

    A GPU is hot within `temperature_margin` of its own slowdown threshold. It stops the run after `temperature_seconds`, or
    after `shutdown_seconds` within `shutdown_margin` of the threshold at which it turns itself off.
    Its clocks are slowed down if a hardware reason was set in `slowdown_share` of the readings of `slowdown_window` seconds.
    That stops the run if the clock was below `slowdown_clock` of the largest meanwhile; otherwise it is a warning.
    """

    ecc_errors: int = 1
    temperature_margin: float = 0.0
    temperature_warn_seconds: float = 60.0
    temperature_seconds: float = 600.0
    shutdown_margin: float = 2.0
    shutdown_seconds: float = 15.0
    slowdown_window: float = 600.0
    slowdown_share: float = 0.6
    slowdown_clock: float = 0.5
    nvlink_errors_per_second: float = 100.0
    repeat_seconds: float = 3600.0
