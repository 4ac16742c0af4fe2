"""Accelerators without a compiler: torch's own backend in Python for kinds of devices that it does not know.

Code that asks for "cuda" does not take these for CUDA devices: what smalti and torch do there alone is not rehearsed, such as
pinned memory and channels-last convolutions. Memory of parameters, gradients, optimizer and activations is the same.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

KIND = "npu"
"""The name of the kind: one that smalti launches."""


class Nothing:
    """A stream or an event: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Nothing()


def install(devices: int) -> None:
    """Make torch, which has been imported, believe in these devices. For the rest of the process."""
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register

    class Module:
        is_available = is_initialized = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: devices)
        _is_in_bad_fork = staticmethod(lambda: False)
        manual_seed_all = staticmethod(lambda seed: None)
        get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
        Stream, Event = Nothing, Nothing
        current_stream = staticmethod(lambda device=None: Nothing())
        stream = staticmethod(lambda stream: nullcontext())

    class Generator(torch.Generator):
        """On the CPU: fake tensors take no values from it."""

        def __new__(cls, device: object = "cpu") -> Any:
            return super().__new__(cls)

    register(KIND, backend_module=Module())
    accelerator: Any = torch.accelerator
    accelerator.empty_cache = lambda: None
    torch.Generator = Generator  # type: ignore[misc]
