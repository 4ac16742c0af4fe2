"""Sharded data parallelism for smalti, on torch's FSDP2. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti_fsdp2.fsdp_plugin import accelerate_plugin

__all__ = ["accelerate_plugin"]


def __getattr__(name: str) -> object:
    if name != "accelerate_plugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from smalti_fsdp2.fsdp_plugin import accelerate_plugin

    return accelerate_plugin
