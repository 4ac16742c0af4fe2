"""Operations on tensors without values that were computed before: the next with the same inputs is answered from a table.

torch keeps such a table too, and takes most of a rehearsal's time for its keys and for the tensors that it makes from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_UNKNOWN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Marks of operations whose result depends on values, or that change the size of an input."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_MOST = 64
"""Tensors of an operation that is kept: an optimizer hands over all weights at once, and once only."""
_torch: Any = torch._C


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Of a tensor. `attributes` is what a fake one knows of itself."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A tensor that an operation returns: the input at `place`, with another look a view of it; without a place a new one."""

    place: int | None
    look: Look | None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What an operation computes, by class and type, and the bytes that it reads and writes."""

    kind: tuple[str, str] | None = None
    flops: int = 0
    touched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The results of an operation, in a list, a tuple or alone (None), and what it costs."""

    made: Sequence[Made | int | None]
    sequence: type | None
    costs: Costs


class Known:
    """The table, for fake tensors of this mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entries: dict[object, Entry | None] = {}
        self._is_kept: dict[object, bool] = {}

    def key_of(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, list[Tensor]]:
        """The key of a call, None if calls of its kind are not kept, and the tensors among its inputs."""
        if (kept := self._is_kept.get(func)) is None:
            kept = self._is_kept[func] = func.namespace == "aten" and not any(each in func.tags for each in _UNKNOWN)
        parts: list[object] = [func, torch.get_default_dtype(), _torch._get_default_device(), *kwargs]
        tensors: list[Tensor] = []
        if not kept or torch.is_inference_mode_enabled() or not self._add(parts, tensors, args):
            return None, tensors
        if kwargs and not self._add(parts, tensors, kwargs.values()):
            return None, tensors
        return tuple(parts) if len(tensors) <= _MOST else None, tensors

    def _add(self, parts: list[object], tensors: list[Tensor], values: Any) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False
                tensors.append(value)
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value._fake_device)
                parts.append(value.requires_grad)
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
                if kind is torch.device and value.index is None and value.type not in ("cpu", "meta"):
                    parts.append(torch.get_device_module(value).current_device())
            elif kind is list or kind is tuple or kind is torch.Size:
                parts.append(len(value))
                if not self._add(parts, tensors, value):
                    return False
            else:
                return False
        return True

    def get(self, key: object) -> Entry | None:
        return self._entries.get(key)

    def again(self, entry: Entry, tensors: Sequence[Tensor]) -> Any:
        """Results like those that the operation had."""
        results = [self._tensor(each, tensors) if isinstance(each, Made) else each for each in entry.made]
        return results[0] if entry.sequence is None else entry.sequence(results)

    def _tensor(self, made: Made, tensors: Sequence[Tensor]) -> Tensor:
        place, look = made.place, made.look
        if look is None:
            assert place is not None
            return tensors[place]
        with cast(AbstractContextManager[None], _torch._DisableTorchDispatch()):
            plain = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
            if place is not None:
                storage = cast(Any, tensors[place].untyped_storage())
                plain.set_(storage, look.offset, look.shape, look.stride)
        make: Any = Tensor._make_subclass
        fake: Tensor = make(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=look.device)
        fake.__dict__.update(look.attributes)
        _torch._set_warn_deprecated_on_mutable_data_ptr(fake)
        return fake

    def learn(self, key: object, tensors: Sequence[Tensor], result: Any, costs: Costs) -> None:
        """Keep what the operation has returned, if the same can be made again."""
        if key in self._entries:
            return
        sequence = type(result) if isinstance(result, list | tuple) else None
        results = [result] if sequence is None else list(result)
        made = [each if each is None or type(each) is int else self._made(each, tensors) for each in results]
        pairs = list(zip(results, made, strict=True))
        new = [each.untyped_storage() for each, how in pairs if isinstance(how, Made) and how.place is None]
        are_known = all(how is not None or each is None for each, how in pairs)
        are_known = are_known and sequence in (None, list, tuple) and len({id(each) for each in new}) == len(new)
        self._entries[key] = Entry(made=made, sequence=sequence, costs=costs) if are_known else None

    def _made(self, result: object, tensors: Sequence[Tensor]) -> Made | None:
        """How to make it again, None if that is not known."""
        if type(result) is not FakeTensor:
            return None
        storage, shape, stride, offset = (
            result.untyped_storage(),
            tuple(result.shape),
            result.stride(),
            int(result.storage_offset()),
        )
        places = [place for place, each in enumerate(tensors) if each.untyped_storage() is storage]
        if len(places) > 1:  # another call may have this tensor once
            return None
        place = places[0] if places else None
        if place is not None and tensors[place] is result:
            return Made(place=place, look=None)
        if result.constant is not None or result.is_complex() or result.requires_grad:
            return None
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if result.numel() else 0
        if place is None and (offset or storage.nbytes() != last * result.element_size()):
            return None  # a part of something larger
        attributes = dict(result.__dict__)
        look = Look(
            shape=shape, stride=stride, offset=offset, dtype=result.dtype, device=result.fake_device, attributes=attributes
        )
        made = Made(place=place, look=look)
        is_like = _torch._dispatch_key_set(self._tensor(made, tensors)) == _torch._dispatch_key_set(result)
        return made if is_like else None
