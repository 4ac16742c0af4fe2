"""Health of GPUs, hangs of ranks, and webhooks, as plugins of smalti. Importing this reads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti_health.circuit_file import Circuit, CircuitFault, read_circuits
    from smalti_health.circuits import CircuitState, circuit_state

__all__ = ["Circuit", "CircuitFault", "CircuitState", "circuit_state", "read_circuits"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from smalti_health import circuits

    return getattr(circuits, name)
