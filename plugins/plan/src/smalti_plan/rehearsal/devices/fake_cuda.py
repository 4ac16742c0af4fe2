"""CUDA devices for a torch that has none: `load` before torch is imported, `install` after.

Only fake tensors can live there. Streams, events and switches of the current device go through torch's own objects, and leave a
trace in the library; so does host memory that is asked to be pinned.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NAME = "NVIDIA H100 80GB HBM3"
MEMORY = 80 * 2**30


class Kind(IntEnum):
    """What an entry of the trace tells; the numbers are those of fake_cuda.cpp."""

    SET_DEVICE = 0
    RECORD = 1
    BLOCK = 2
    SYNC_STREAM = 3
    SYNC_EVENT = 4
    SYNC_DEVICE = 5
    PIN = 6
    NOTE = 7


@dataclass(frozen=True)
class Entry:
    """`value`: the event of RECORD, BLOCK and SYNC_EVENT, the bytes of PIN, what NOTE was given."""

    kind: Kind
    thread: int
    device: int
    stream: int
    value: int


# --- the library ----------------------------------------------------------------------------------------------------


def library() -> Path:
    """The path of the compiled library. It is compiled first if it was not yet, for this source and this torch.

    Raises OSError if there is no compiler, it fails, or the folder cannot be written.
    """
    built = folder() / f"libfake_cuda-{_digest()}.so"
    if not built.exists():
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            raise FileNotFoundError("no C++ compiler")
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            made = Path(scratch) / built.name
            done = subprocess.run([compiler, *_arguments(made)], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{compiler} cannot compile {SOURCE}: {done.stderr.strip()[-2000:]}")
            made.rename(built)  # whole or not there, whoever else compiles it at the same time
    return built


def folder() -> Path:
    """Where the library is: in the folder of torch's extensions if the environment names one, else in the user's cache."""
    from platformdirs import user_cache_path

    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(own) / "fake_cuda" if own else user_cache_path("smalti") / "fake_cuda"


def _digest() -> str:
    """Of the source, and of the torch that it is linked to, by version and place."""
    linked = f"{version('torch')} {_torch()}"
    return hashlib.sha256(SOURCE.read_bytes() + linked.encode()).hexdigest()[:16]


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _arguments(made: Path) -> list[str]:
    torch = _torch()
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    options = ["-std=c++20", "-O1", "-g0", "-shared", "-fPIC"]
    return [*options, *includes, str(SOURCE), "-o", str(made), *libraries]


_loaded: ctypes.CDLL | None = None
_kernels: list[Any] = []
"""What gives operations a kernel for as long as it lives."""


def load() -> None:
    """Before torch is imported: what it looks up when it starts must be there. Raises OSError as `library` does."""
    global _loaded
    assert "torch" not in sys.modules, "the library comes before torch"
    _loaded = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    _loaded.fake_cuda_note.argtypes = [ctypes.c_int, ctypes.c_int64]
    _loaded.fake_cuda_register.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    _loaded.fake_cuda_unregister.argtypes = [ctypes.c_void_p]
    for name in ("fake_cuda_trace_length", "fake_cuda_this_thread"):
        getattr(_loaded, name).restype = ctypes.c_int64
    _loaded.fake_cuda_trace.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]


def note(value: int, device: int = -1) -> None:
    """Leave a NOTE in the trace, with the stream that is current on the device. Without the library there is no trace."""
    if _loaded is not None:
        _loaded.fake_cuda_note(device, value)


def this_thread() -> int:
    """As entries of the trace call it."""
    return int(_loaded.fake_cuda_this_thread()) if _loaded is not None else threading.get_native_id()


def trace(since: int = 0) -> list[Entry]:
    """What has happened, in order, from the entry with this number on."""
    count = trace_length()
    if not count or _loaded is None:
        return []
    numbers = (ctypes.c_int64 * (5 * count))()
    _loaded.fake_cuda_trace(numbers, count)
    return [Entry(Kind(numbers[5 * n]), *numbers[5 * n + 1 : 5 * n + 5]) for n in range(since, count)]


def trace_length() -> int:
    return int(_loaded.fake_cuda_trace_length()) if _loaded is not None else 0


# --- torch's Python side --------------------------------------------------------------------------------------------


def install(devices: int, *, name: str = NAME, memory: int = MEMORY, capability: tuple[int, int] = (9, 0)) -> None:
    """Make torch, which has been imported, believe in these devices. For the rest of the process."""
    import torch
    import torch._dynamo  # it looks for more of CUDA than is here, once there seems to be some
    import torch._inductor.test_operators

    assert _loaded is not None, "load() comes first"
    assert _loaded.fake_cuda_install(devices), "torch has looked for CUDA before"
    cuda: Any = torch.cuda
    for attribute, answer in (_places(devices) | _facts(name, memory, capability) | _nothing()).items():
        setattr(cuda, attribute, answer)
    cuda.streams.Stream, cuda.streams.Event = cuda.Stream, cuda.Event
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: 0
    general: Any = torch.accelerator
    general.is_available = lambda: True
    general.current_accelerator = lambda check_available=False: torch.device("cuda")
    general.device_count = lambda: devices
    general.empty_cache = general.reset_peak_memory_stats = lambda *_, **__: None
    general.memory_allocated = general.max_memory_allocated = lambda _=None: 0
    torch.empty(1, pin_memory=True)  # before the first, torch takes no memory for pinned
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        # Else torch would compute it in pieces, which take memory.
        _kernels.append(torch.library.Library("aten", "IMPL", "CUDA"))  # type: ignore[no-untyped-call]
        _kernels[0].impl("silu_backward", lambda gradient, values: torch.empty_like(values))


def _places(devices: int) -> dict[str, object]:
    """What torch.cuda says of devices, streams and events."""
    import torch

    here: Any = torch._C

    def index(device: Any = None) -> int:
        given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return int(here._accelerator_getDeviceIndex()) if given.index is None else given.index

    def exchange(device: int) -> int:
        before = int(here._accelerator_getDeviceIndex())
        if device not in (-1, before):
            here._accelerator_setDeviceIndex(device)
        return before

    class Stream(torch.Stream):
        def __new__(cls, device: object = None, priority: int = 0, **_: object) -> Any:
            return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, *_: object, **__: object) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    return {
        "_is_compiled": lambda: True,
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: devices,
        "current_device": index,
        "set_device": lambda device: exchange(index(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(device_index=index(device), device_type=1, stream_id=0),
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
    }


def _facts(name: str, memory: int, capability: tuple[int, int]) -> dict[str, object]:
    """What torch.cuda says of a device of this kind."""
    import torch

    class Properties:
        total_memory = memory
        major, minor = capability
        multi_processor_count = 132

    class Runtime:
        cudaHostRegister = staticmethod(  # noqa: N815
            lambda address, size, flags: _loaded.fake_cuda_register(address, size) if _loaded is not None else 0
        )
        cudaHostUnregister = staticmethod(  # noqa: N815
            lambda address: _loaded.fake_cuda_unregister(address) if _loaded is not None else 0
        )

    Properties.name = name  # type: ignore[attr-defined]
    return {
        "cudart": lambda: Runtime,
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: Properties,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_stats": lambda device=None: {},
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8, device="cpu"),
        "get_rng_state_all": list,
    }


def _nothing() -> dict[str, object]:
    """What torch.cuda does and need not do here."""
    quiet = ("_lazy_init", "_lazy_call", "init", "empty_cache", "ipc_collect", "manual_seed")
    more = ("manual_seed_all", "set_rng_state", "reset_peak_memory_stats", "reset_max_memory_allocated")
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {**dict.fromkeys((*quiet, *more), lambda *_, **__: None), **dict.fromkeys(sizes, lambda _=None: 0)}
