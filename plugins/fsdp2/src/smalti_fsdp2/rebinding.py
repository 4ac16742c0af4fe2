"""Attention of some modules, replaced in copies of the functions that compute it.

No mode of torch is entered, through which torch.compile could not trace where activations are computed again. And nothing that
others see changes: attention elsewhere in the process stays as it is.

The copies are shared by all modules of a class: one graph then serves all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from copy import copy
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smalti import UserError

_NAME = "scaled_dot_product_attention"
_NATIVE = "native"
"""diffusers' name for this attention among the kinds that it can dispatch to."""

AttentionFunction = Callable[..., Tensor]


class Rebinding:
    """In the modules that it is given, `attention` takes the place of `F.scaled_dot_product_attention`, with its arguments."""

    def __init__(self, attention: AttentionFunction) -> None:
        functional = _copied(F, **{_NAME: attention})
        layers = _copied(nn, functional=functional)
        self._swaps: dict[int, object] = {
            id(F): functional,
            id(nn): layers,
            id(torch): _copied(torch, nn=layers),
            id(F.scaled_dot_product_attention): attention,
        }
        self._functions: dict[FunctionType, FunctionType] = {}
        self._classes: dict[type, type] = {}
        if (dispatching := _dispatching_of_diffusers()) is not None:
            self._functions[dispatching] = _dispatched(attention)

    def apply(self, module: nn.Module) -> bool:
        """Whether the module, or one within it, computes attention so; it does from now on by `attention`."""
        found = [self._apply_to_one(each) for each in module.modules()]
        return any(found)

    def _apply_to_one(self, module: nn.Module) -> bool:
        found = [self._class_changed(module)]
        processor = vars(module).get("processor")  # to which modules of diffusers leave it; it may be that of others too
        if processor is not None:
            own = copy(processor)
            if self._class_changed(own):
                module.processor = own
                found.append(True)
        forward = vars(module).get("forward")
        if forward is not None and (changed := self._callable(forward)) is not forward:
            module.forward = changed  # type: ignore[assignment]
            found.append(True)
        return any(found)

    def _class_changed(self, instance: object) -> bool:
        kind = type(instance)
        if kind not in self._classes:
            self._classes[kind] = self._subclass(kind)
        if self._classes[kind] is kind:
            return False
        instance.__class__ = self._classes[kind]
        return True

    def _subclass(self, kind: type) -> type:
        """The class itself if nothing in it computes attention."""
        methods = {name: each for name in dir(kind) if isinstance(each := getattr_static(kind, name), FunctionType)}
        changed = {name: new for name, each in methods.items() if (new := self._function(each)) is not each}
        if not changed:
            return kind
        return type(kind.__name__, (kind,), {**changed, "__module__": kind.__module__, "__qualname__": kind.__qualname__})

    def _callable(self, value: object) -> object:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType) and isinstance(value.__func__, FunctionType):
            function = self._function(value.__func__)
            return value if function is value.__func__ else MethodType(function, value.__self__)
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        """A copy that finds other values under its global names, and in its closure, if one of them leads to attention."""
        if function not in self._functions:
            self._functions[function] = function  # for one that calls itself
            if not (function.__module__ or "").startswith("torch."):
                self._functions[function] = self._copy(function)
        return self._functions[function]

    def _copy(self, function: FunctionType) -> FunctionType:
        names = set(_names(function.__code__))
        found = {name: function.__globals__[name] for name in names if name in function.__globals__}
        swapped = {name: new for name, value in found.items() if (new := self._swapped(value, names)) is not value}
        cells = [_content(cell) for cell in function.__closure__ or ()]
        contents = [self._callable(content) for content in cells]
        if not swapped and all(new is old for new, old in zip(contents, cells, strict=True)):
            return function
        scope = {**function.__globals__, **swapped}
        scope.pop("__name__", None)  # by which torch.compile would look into the module instead
        closure = tuple(
            cell if new is old else CellType(new)
            for cell, new, old in zip(function.__closure__ or (), contents, cells, strict=True)
        )
        copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
        copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
        vars(copied).update(vars(function))
        return copied

    def _swapped(self, value: object, names: set[str]) -> object:
        if isinstance(value, ModuleType) and _NAME not in names:
            return value
        if id(value) in self._swaps:
            return self._swaps[id(value)]
        return self._callable(value)


def _copied(module: ModuleType, **changed: object) -> ModuleType:
    copied = ModuleType(module.__name__)
    vars(copied).update(vars(module), **changed)
    return copied


def _names(code: CodeType) -> Iterator[str]:
    """Those that the function asks globals and objects for, and the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _dispatching_of_diffusers() -> FunctionType | None:
    """diffusers' own function for all kinds of attention, if it is there and chooses torch's."""
    if os.environ.get("DIFFUSERS_ATTN_BACKEND", _NATIVE) != _NATIVE:
        return None
    return getattr(sys.modules.get("diffusers.models.attention_dispatch"), "dispatch_attention_fn", None)


def _dispatched(attention: AttentionFunction) -> FunctionType:
    """What takes the place of that function: (B, L, H, d), unlike `attention`, and a mask of keys may be (B, L)."""

    def dispatch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: object = None,
        *,
        backend: str | None = None,
        parallel_config: object = None,
    ) -> Tensor:
        if backend not in (None, _NATIVE):
            raise UserError(f"the attention '{backend}' of diffusers cannot be split", fix="--context_parallel_size=1")
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return mixed.transpose(1, 2)

    assert isinstance(dispatch, FunctionType)
    return dispatch
