"""Tensors that have a place, a shape and a type, and no values: the mode in which a run is rehearsed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.distributed.tensor import _utils

aten = torch.ops.aten
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What torch raises for an operation whose result cannot be known without values."""
_PIN = (aten._pin_memory.default, aten.pin_memory.default)
_CPU, _FIRST_CPU = torch.device("cpu"), torch.device("cpu", 0)
_NUMPY = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


def needs_values(error: Exception) -> bool:
    """Whether code cannot go on with tensors without values. torch.tensor, given some, has a plain error of its own."""
    return isinstance(error, NEEDS_VALUES) or "its data is not allocated yet" in str(error)


class RehearsalMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Values that the host asks for are 1, truths are False, and tensors of one shape are equal.

    All threads of the process may compute in it.
    """

    avoid_device_init = True  # else torch.tensor(..., device="cuda") would make a real one

    def __init__(self) -> None:
        self._own = _OfThread()
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].constant is None:
            return _number(args[0])
        if func is aten.equal.default:
            return bool(args[0].shape == args[1].shape)
        if func is aten.record_stream.default:  # for the allocator, and there is none
            return None
        if func is aten.is_pinned.default and isinstance(args[0], FakeTensor):
            return False
        if func in _PIN:
            return super().dispatch(aten.clone.default, types, args[:1], {})
        if kwargs and "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "_fused_" in func._schema.name:
            _check_devices(func, args)
        if kwargs and kwargs.get("device") == _FIRST_CPU:  # torch's decompositions number the CPU
            kwargs = {**kwargs, "device": _CPU}
        return super().dispatch(func, types, args, kwargs or {})


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.inside = False
        self.entered: list[object] = []


def _of_each_thread(name: str) -> property:
    """An attribute that torch keeps for one thread; here savers and autograd work beside the loop."""

    def get(mode: RehearsalMode) -> object:
        return getattr(mode._own, name)

    def put(mode: RehearsalMode, value: object) -> None:
        setattr(mode._own, name, value)

    return property(get, put)


for _torchs, _own in {"in_kernel_invocation": "inside", "enter_stack": "entered"}.items():
    setattr(RehearsalMode, _torchs, _of_each_thread(_own))


def install() -> None:
    """For the rest of the process: fake tensors are zeros to numpy, and modules can move fake parameters.

    torch would swap those in place, and cannot. Shards begin at 0: torch takes their beginnings from tensors, and any other
    number is outside the only shard of one rank.
    """
    own = Tensor.numpy
    tensor: Any = Tensor
    tensor.numpy = lambda self, **more: (
        np.zeros(self.shape, _NUMPY[self.dtype]) if isinstance(self, FakeTensor) else own(self, **more)
    )
    module: Any = nn.Module
    module._apply = _apply
    shards: Any = _utils
    shards._get_first_offset = lambda offsets: 0


def _number(tensor: FakeTensor) -> bool | int | float:
    return {torch.bool: False, torch.uint8: 0}.get(tensor.dtype, 1.0 if tensor.dtype.is_floating_point else 1)


def _check_devices(func: Any, args: Any) -> None:
    """What CUDA's kernels check and fake tensors do not: these let numbers on the CPU pass with any other tensors."""
    devices = {str(each.device) for part in args if isinstance(part, list | tuple) for each in part if isinstance(each, Tensor)}
    if len(devices) > 1:
        found = " and ".join(sorted(devices))
        raise RuntimeError(f"{func.name()}: expected all tensors to be on the same device, but found {found}")


@torch.no_grad()
def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(change)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is not None and (made := change(parameter)) is not parameter:
            module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else change(buffer)
    return module
