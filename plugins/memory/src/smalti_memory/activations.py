"""What a forward pass keeps for the backward pass outside of what is recomputed, in host memory in between: inputs of blocks.

Each tensor is copied on a side stream as soon as it is kept, and the device lets go of it two copies later. In the backward
pass the two before are on their way back while a block computes. Host memory is one arena, pinned where that is possible, as
large as the largest pass so far.

Copies are exact, so losses and gradients are those of a run without it. Weights stay where they are, and so does what is small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from smalti.checkpoint import Arena
from smalti.parallel import side_stream

_LEAST = 2**16
"""Bytes of the smallest tensor that is worth a copy."""
_UNDER_WAY = 2
"""Copies that may be under way in either direction; as many tensors are on the device besides those in use."""
_ALIGNMENT = 256
_SLAB = 64 * 2**20
"""Bytes of host memory that are taken at a time while it is unknown how many a pass needs."""

_Layout = tuple[object, ...]


@dataclass(kw_only=True, eq=False)
class _Kept:
    """A tensor in host memory. `number`: its place in the order in which the pass kept them."""

    number: int
    host: Tensor
    there: Tensor | None
    """The same on the device, while it is there."""
    copied: torch.Event | None = None
    """When the last copy, to or from the host, is complete; None if the stream has waited for it."""
    shared: bool = False
    """Several operations keep it, so it stays on the device once the first has asked for it."""
    asked: bool = False
    """An operation of the backward pass has asked for it."""


class ActivationOffload:
    """Keeps in host memory what forward passes of `model` keep on `device` for the backward pass. `copied` counts bytes."""

    def __init__(self, device: str, least: int = _LEAST) -> None:
        self.device, self.copied = torch.device(device), 0
        self._least, self._stream = least, side_stream(device)
        self._memory = _HostMemory(self.device.type)
        self._known: WeakKeyDictionary[torch.UntypedStorage, WeakValueDictionary[_Layout, _Kept]] = WeakKeyDictionary()
        self._order: list[ReferenceType[_Kept]] = []
        self._under_way: deque[_Kept] = deque()

    def attach(self, model: nn.Module) -> None:
        """From here on the model's forward pass works like this."""
        model.forward = self._keeping(model.forward)

    def _keeping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def keeping(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            self._begin()
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*arguments, **named)

        return keeping

    def _begin(self) -> None:
        """A forward pass begins. Host memory is used again, unless the backward pass of an earlier one is still to come."""
        while self._under_way:
            self._arrive(self._under_way.popleft())
        if all(kept() is None for kept in self._order):
            self._order.clear()
            self._memory.reuse()

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not self._wants(tensor):
            return tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._known.setdefault(tensor.untyped_storage(), WeakValueDictionary())
        if (kept := known.get(layout)) is not None:
            kept.shared = True
            return kept
        kept = known[layout] = _Kept(number=len(self._order), host=self._memory.take(tensor), there=tensor.detach())
        self._order.append(ref(kept))
        self._send(kept, kept.host, tensor.detach())
        while len(self._under_way) > _UNDER_WAY:
            left = self._under_way.popleft()
            self._arrive(left)
            left.there = None
        return kept

    def _wants(self, tensor: Tensor) -> bool:
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if weight or tensor.device != self.device or is_traceable_wrapper_subclass(tensor):
            return False
        return tensor.nbytes >= self._least and _is_dense(tensor)

    def _unpack(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.asked = True
        there = self._there(packed)
        if packed in self._under_way:
            self._under_way.remove(packed)
        self._arrive(packed)
        if not packed.shared:
            packed.there = None
        earlier = (self._order[number]() for number in range(packed.number - 1, -1, -1))
        for kept in islice((each for each in earlier if each is not None and not each.asked), _UNDER_WAY):
            self._there(kept)
        return there

    def _there(self, kept: _Kept) -> Tensor:
        """The tensor on the device, which is on its way if it was not there."""
        if kept.there is None:
            kept.there = torch.empty_like(kept.host, device=self.device)
            self._send(kept, kept.there, kept.host)
        return kept.there

    def _send(self, kept: _Kept, target: Tensor, source: Tensor) -> None:
        """Begin to copy, once all that was queued so far has been computed."""
        self.copied += target.nbytes
        self._under_way.append(kept)
        with torch.no_grad():
            kept.copied = self._copy(target, source)

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event | None:
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _arrive(self, kept: _Kept) -> None:
        """What is queued from here on finds the copy complete."""
        if kept.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(kept.copied)
            kept.copied = None


def keeps_all() -> bool:
    """Whether what is computed now keeps its activations, rather than being recomputed in the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or isinstance(getattr(hooks[0], "__self__", None), ActivationOffload)


class _HostMemory:
    """Host memory for copies from a kind of device, given out in order and used again for the next pass."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._arenas: list[Arena] = []
        self._slab = torch.empty(0, dtype=torch.uint8)
        """What is given out, from `_used` on."""
        self._used = self._needed = 0

    def take(self, like: Tensor) -> Tensor:
        size = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._needed += size
        if self._used + size > len(self._slab):
            self._add(max(size, _SLAB))
        part = self._slab[self._used : self._used + like.nbytes]
        self._used += size
        return part.view(like.dtype).as_strided(like.shape, like.stride())

    def reuse(self) -> None:
        """Nothing that was taken is used any longer. Several pieces become one, of what was needed in all."""
        if len(self._arenas) > 1:
            for arena in self._arenas:
                arena.release()
            self._arenas.clear()
            self._add(self._needed)
        self._used = self._needed = 0

    def _add(self, size: int) -> None:
        arena = Arena([size], self._kind)
        self._arenas.append(arena)
        self._slab, self._used = arena.take(torch.Size([size]), torch.uint8), 0


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy of as many bytes can have the same strides."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
