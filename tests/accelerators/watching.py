"""Fake tensors whose every operation is written down: its stream, what it reads and writes, whether the host waits for it."""

import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from smalti.parallel.state import FlatRange
from smalti_plan.rehearsal.devices import fake_cuda

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
_PACKAGES = ("smalti", "smalti_fsdp2", "smalti_deepspeed", "smalti_diffusers", "smalti_optimizers", "smalti_memory")
_NUMPY = {torch.uint8: np.uint8, torch.float32: np.float32, torch.int64: np.int64}
_PIN = (aten._pin_memory.default, aten.pin_memory.default)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation, on the stream that the trace's NOTE of the same number tells; on the host if `device` is None.

    `reads` and `writes` are numbers of storages. `waits`: the host goes on only when the stream has come so far. `where` is the
    function of smalti that asked for it, "" for none. `tf32`: products of fp32 matrices may be computed in TF32.
    `touched`: bytes of the tensors that it reads and writes.
    """

    name: str
    device: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    waits: bool
    where: str
    tf32: bool
    touched: int


class Watch(FakeTensorMode):
    """The mode in which a run is built and trained. Values that the host asks for are 1, and truths are False."""

    avoid_device_init = True  # else torch.tensor(..., device="cuda") would make a real one
    # torch keeps these for one thread; here savers and autograd work beside the loop.
    in_kernel_invocation = property(lambda self: self._own.inside, lambda self, value: setattr(self._own, "inside", value))
    enter_stack = property(lambda self: self._own.entered, lambda self, value: setattr(self._own, "entered", value))

    def __init__(self) -> None:
        self._own = _OfThread()
        super().__init__(allow_non_fake_inputs=True)
        self.operations: list[Operation] = []
        self.pinned: list[tuple[int, int]] = []
        """Of each piece of fake host memory that was asked to be pinned: the thread, as the trace calls it, and the bytes."""
        self.threads: dict[int, str] = {}
        """The names of those that have worked on fake tensors."""
        self._storages: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._count = 0
        self._pinned: set[int] = set()
        self._lock = threading.RLock()

    def dispatch(self, func, types, args=(), kwargs=None):
        with self._lock:
            return self._dispatch(func, types, args, dict(kwargs or {}))

    def _dispatch(self, func, types, args, kwargs):
        if func is aten.record_stream.default:  # for the allocator, and there is none
            return None
        if any(isinstance(value, FlatRange) for value in args):
            args = tuple(map(_plain, args))
        if func is aten._local_scalar_dense.default and args[0].constant is None:
            return self._number(args[0])
        if func is aten.is_pinned.default and isinstance(args[0], FakeTensor):
            return self._is_pinned(args[0])
        if func in _PIN:
            made = super().dispatch(aten.clone.default, types, args[:1], {})
            self._pin(made)
            return made
        if func is aten.set_.source_Tensor and not isinstance(args[1], FakeTensor):  # real memory, as a checkpoint is read into
            source = self.from_tensor(args[1])
            if args[1].is_pinned():
                self._pinned.add(self._number_of(source))
            return super().dispatch(func, types, (args[0], source), kwargs)
        pin = kwargs.pop("pin_memory", None)
        _same_device(func, args)
        made = super().dispatch(func, types, args, kwargs)
        if made is NotImplemented:  # for a DTensor to do on its part
            return made
        if pin or (func is aten._to_copy.default and _pins_copy(args[0], made, kwargs)):
            self._pin(made)
        self._write_down(func, args, kwargs, made)
        return made

    def _number(self, tensor: FakeTensor) -> bool | int | float:
        if tensor.fake_device.type != "cpu":
            self._append("item", tensor.fake_device.index, [tensor], [], waits=True)
        return {torch.bool: False, torch.uint8: 0}.get(tensor.dtype, 1.0 if tensor.dtype.is_floating_point else 1)

    def _write_down(self, func, args, kwargs, made) -> None:
        if func.namespace not in ("aten", "c10d") or func.is_view or "empty" in func.name():
            return
        reads, writes = _accesses(func, args, kwargs, made)
        devices = {tensor.device for tensor in (*reads, *writes)}
        places = sorted(device.index or 0 for device in devices if device.type not in ("cpu", "meta"))
        if not devices - {torch.device("meta")}:
            return
        self._append(
            func._schema.name.removeprefix("aten::"),
            places[0] if places else None,
            reads,
            writes,
            waits=len(devices) > 1 and func in _COPIES and self._copy_waits(func, args, kwargs, made),
        )

    def _copy_waits(self, func, args, kwargs, made) -> bool:
        """Whether the host waits for a copy between host and device; that into a device's memory never does if it need not."""
        if func is aten._to_copy.default:
            targets, non_blocking = [made], kwargs.get("non_blocking", False)
        else:
            targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        to_host = any(target.device.type == "cpu" for target in targets)
        return not non_blocking or (to_host and not all(self._is_pinned(target) for target in targets))

    def _append(self, name: str, device: int | None, reads, writes, *, waits: bool) -> None:
        self.threads.setdefault(fake_cuda.this_thread(), threading.current_thread().name)
        operation = Operation(
            name=name,
            device=device,
            reads=tuple(map(self._number_of, reads)),
            writes=tuple(map(self._number_of, writes)),
            waits=waits,
            where=_where(),
            tf32=torch.backends.cuda.matmul.allow_tf32,
            touched=sum(tensor.nbytes for tensor in (*reads, *writes)),
        )
        self.operations.append(operation)
        fake_cuda.note(len(self.operations) - 1, -1 if device is None else device)

    def _number_of(self, tensor: Tensor) -> int:
        """Of the storage."""
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages[storage] = (self._count, tensor.device.type)
            self._count += 1
        return self._storages[storage][0]

    def held(self) -> int:
        """Bytes that tensors hold on devices now."""
        return sum(storage.nbytes() for storage, (_, kind) in list(self._storages.items()) if kind not in ("cpu", "meta"))

    def _pin(self, tensor: Tensor) -> None:
        self._pinned.add(self._number_of(tensor))
        self.pinned.append((fake_cuda.this_thread(), tensor.untyped_storage().nbytes()))

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self._number_of(tensor) in self._pinned if isinstance(tensor, FakeTensor) else tensor.is_pinned()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.inside = False
        self.entered: list = []


def install() -> None:
    """For the rest of the process: fake tensors are zeros to numpy, and modules can move fake parameters.

    torch would swap those in place, and cannot. Fake memory that is registered is known as pinned.
    """
    from smalti.checkpoint import Arena

    register = Arena._register

    def registered(arena, length):
        register(arena, length)
        if _is_fake(arena._memory) and length:
            watch = arena._memory.fake_mode
            watch._pinned.add(watch._number_of(arena._memory))

    Arena._register = registered
    own = Tensor.numpy
    Tensor.numpy = lambda self, **more: np.zeros(self.shape, _NUMPY[self.dtype]) if _is_fake(self) else own(self, **more)
    nn.Module._apply = _apply


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


@torch.no_grad()
def _apply(module: nn.Module, change, recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is not None and (made := change(parameter)) is not parameter:
            module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else change(buffer)
    return module


def _plain(value: object) -> object:
    if not isinstance(value, FlatRange):
        return value
    with unset_fake_temporarily():
        return value.as_subclass(Tensor)


def _pins_copy(source: Tensor, made: Tensor, kwargs) -> bool:
    """A copy that the host is not to wait for goes to pinned memory by itself."""
    return bool(kwargs.get("non_blocking")) and made.device.type == "cpu" and source.device.type != "cpu"


def _same_device(func, args) -> None:
    """What CUDA's kernels check and fake tensors do not: these let numbers on the CPU pass with any other tensors."""
    if "_fused_" in func.name():
        devices = {str(tensor.device) for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            told = " and ".join(sorted(devices))
            raise RuntimeError(f"{func.name()}: expected all tensors to be on the same device, but found {told}")


def _accesses(func, args, kwargs, made) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes = list(_tensors(made))
    given = list(zip(func._schema.arguments, args, strict=False))
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    for place, (argument, value) in enumerate(given):
        writing = argument.alias_info is not None and argument.alias_info.is_write
        if func.namespace == "c10d":  # whose schemas do not say so
            writing = place == 0
        (writes if writing else reads).extend(_tensors(value))
    return reads, writes


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _where() -> str:
    """The innermost function of smalti's that is being called: "training.trainer.train_step"."""
    frame = sys._getframe(2)
    while frame is not None:
        if (module := module_of(frame.f_code.co_filename)) is not None:
            return f"{module}.{frame.f_code.co_qualname.replace('.<locals>', '')}"
        frame = frame.f_back
    return ""


@cache
def module_of(file: str) -> str | None:
    """A file of smalti's packages as a module within its package; None for any other, whatever the folders above are called."""
    folder = next((each for each in _folders() if file.startswith(f"{each}/")), None)
    return file[len(folder) + 1 :].removesuffix(".py").replace("/", ".") if folder else None


@cache
def _folders() -> list[str]:
    """Those of the installed packages."""
    found = [spec for name in _PACKAGES if (spec := find_spec(name)) is not None]
    return [str(Path(spec.origin).parent) for spec in found if spec.origin is not None]
