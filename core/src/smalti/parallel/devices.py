"""What the ranks of this machine compute on: which kind of device, and whether bf16 is native to it.

Importing this module imports no torch; calling it does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from inspect import signature

from smalti.config import Config, LaunchOptions

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch's allocator reads, under its name of today and its earlier ones. Which of two counts differs between versions."""
_WITHOUT_BF16 = frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"))
"""What oneDNN can be limited to that leaves a processor no bf16 products; every later level has them."""
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""The first that is set counts, in any case of letters (oneDNN's developer guide, "CPU Dispatcher Control")."""


_MANY_TOKENS = 8192
"""Per image: from here on a step on a CPU takes minutes, whatever the model."""


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """How large an image is to the model, and in pixels."""

    tokens: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.tokens:,} per image at {self.width}x{self.height}"


@dataclass(frozen=True, kw_only=True)
class NativeBf16:
    """Whether a kind of device computes bf16 natively. `why` is a whole clause, such as "this CPU has no ..."."""

    native: bool
    why: str


def accelerator_kind(config: Config) -> str:
    """Either "cpu" or the kind of accelerator that the ranks will run on."""
    if config[LaunchOptions].use_cpu:
        return "cpu"
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None else "cpu"


@cache
def native_bf16(kind: str) -> NativeBf16:
    """Whether the devices of this kind on this machine compute bf16 natively; accelerators that are absent count as native."""
    if kind == "cpu":
        return _cpu_bf16()
    import torch

    if not _present(kind):
        return NativeBf16(native=True, why=f"{kind} devices are taken to compute it natively; this machine has none to ask")
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    if supported is None:
        return NativeBf16(native=False, why=f"torch does not say whether {kind} devices compute bf16 natively")
    keywords = {"including_emulation": False} if "including_emulation" in signature(supported).parameters else {}
    if supported(**keywords):
        return NativeBf16(native=True, why=f"{_name_of(kind)} computes it natively")
    return NativeBf16(native=False, why=f"{_name_of(kind)} emulates bf16")


def _cpu_bf16() -> NativeBf16:
    """Of the processor, as far as oneDNN will make use of it: that is where torch has its bf16 matrix products computed.

    `ATEN_CPU_CAPABILITY` limits torch's own kernels and no matrix product. torch answers for oneDNN and its limits, but says
    yes from AVX-512 on, where products in bf16 without instructions for it are still 5 times slower than in fp32; and what
    else it tells of a processor knows no limits.
    """
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return NativeBf16(native=False, why="this build of torch has no oneDNN, which computes bf16 on CPUs")
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch.cpu._is_avx2_supported():
        found = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported(), "amx_bf16": torch.cpu._is_amx_tile_supported()}
        names = [name for name, there in found.items() if there]
        limit = next(((name, os.environ[name]) for name in _LIMITS if os.environ.get(name)), None)
        if names and limit and (limit[1].upper() in _WITHOUT_BF16 or not supported):
            return NativeBf16(native=False, why=f"{'='.join(limit)} takes the bf16 instructions of this CPU away")
        if names and supported:
            return NativeBf16(native=True, why=f"this CPU computes it natively ({', '.join(names)})")
        return NativeBf16(native=False, why="this CPU has no bf16 instructions (avx512_bf16 or amx_bf16)")
    if supported:
        return NativeBf16(native=True, why="this CPU computes it natively")
    return NativeBf16(native=False, why="this CPU has no bf16 instructions")


def describe_devices(config: Config, kind: str) -> str:
    """What the ranks of a machine run on, for people: "8 x NVIDIA H100 80GB HBM3", "CPU, 2 processes"."""
    options = config[LaunchOptions]
    local = options.num_processes // options.num_machines
    on_each = f" on each of {options.num_machines} machines" if options.num_machines > 1 else ""
    if kind != "cpu":
        return f"{local} x {_name_of(kind)}{on_each}"
    processes = f", {local} processes{on_each}" if local > 1 or on_each else ""
    return f"CPU{processes}" if options.use_cpu else f"CPU{processes} ({_missing()})"


def cpu_notices(config: Config, kind: str, size: ImageSize) -> list[str]:
    """What the user may not have meant about a run on CPUs: several ranks unasked, far too many tokens."""
    if kind != "cpu":
        return []
    options, notices = config[LaunchOptions], []
    if not options.use_cpu and options.num_processes > 1:
        notices.append(f"{_missing()}, so {options.num_processes} processes train on the CPU; --use_cpu to silence")
    if size.tokens >= _MANY_TOKENS:
        notices.append(f"{size.tokens:,} tokens per image take minutes a step on a CPU; --resolution=64 makes far fewer")
    return notices


def _missing() -> str:
    """Why no accelerator is used, as far as torch tells."""
    import torch

    built = torch.accelerator.current_accelerator()
    if built is None:
        return "no GPU found: this build of torch is for CPUs"
    tool = {"cuda": "rocm-smi" if torch.version.hip else "nvidia-smi", "xpu": "xpu-smi", "npu": "npu-smi"}.get(built.type)
    return f"no GPU found: torch sees no {built.type} device{f', check {tool}' if tool else ''}"


def _name_of(kind: str) -> str:
    """The name of the first device of this kind as its maker has it; the kind where there is none or torch does not tell."""
    import torch

    if not _present(kind):
        return f"{kind} device (not on this machine)"
    name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(name_of(0)) if name_of is not None else f"{kind} device"


def _present(kind: str) -> bool:
    import torch

    present = torch.accelerator.current_accelerator(check_available=True)
    return present is not None and present.type == kind
