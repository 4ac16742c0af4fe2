"""Tensors that are read later: what a conversion of a state dict does to them is recorded, and done when a value is asked for.

A conversion function of diffusers gets these in place of real tensors. It sees their shapes and types; splitting, joining,
transposing and the like give new ones. So the whole conversion costs no memory, and each result can be read by itself.
Of a tensor that is only split along its first dimension, only those rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.clone.default, _aten.alias.default)
"""Operations that change no value."""
_PIECES = (_aten.split.Tensor, _aten.split_with_sizes.default)

Read = Callable[[str, int, int | None], Tensor]
"""Reads the rows from the first to before the last of the tensor with this name; None is the end."""


@dataclass(frozen=True)
class Rows:
    """A range of the first dimension of a stored tensor; `stop` is None for all of it."""

    name: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Operation:
    """One result of an operation on other tensors."""

    function: Callable[..., object]
    arguments: Sequence[object]
    keywords: Mapping[str, object]
    output: int


class PendingTensor(Tensor):
    """A tensor of known shape and type without values. `recipe` tells how they are read."""

    recipe: Rows | Operation

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, recipe: Rows | Operation) -> PendingTensor:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.recipe = recipe
        return made

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"PendingTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if func in _SAME or (func is _aten.cat.default and len(args[0]) == 1):
            given = args[0] if func in _SAME else args[0][0]
            return PendingTensor(given.shape, given.dtype, given.recipe)
        if func is _aten.split_with_sizes.default:
            args = (args[0], _proportional(args[0].shape[_dimension(args)], args[1]), *args[2:])
        shaped = func(*tree_map(_without_values, args), **tree_map(_without_values, dict(kwargs or {})))
        made = shaped if isinstance(shaped, tuple | list) else (shaped,)
        results = [
            PendingTensor(each.shape, each.dtype, recipe)
            for each, recipe in zip(made, _recipes(func, args, kwargs or {}, made), strict=True)
        ]
        return results if isinstance(shaped, tuple | list) else results[0]


def evaluate(tensor: Tensor, read: Read) -> Tensor:
    """The values of a tensor; those that are not pending are returned as they are."""
    if not isinstance(tensor, PendingTensor):
        return tensor
    recipe = tensor.recipe
    if isinstance(recipe, Rows):
        return read(recipe.name, recipe.start, recipe.stop)
    arguments, keywords = tree_map(lambda each: evaluate(each, read) if isinstance(each, Tensor) else each, _both(recipe))
    result = recipe.function(*arguments, **keywords)
    return cast(Tensor, result[recipe.output] if isinstance(result, tuple | list) else result)


def sources(tensor: Tensor) -> Iterator[str]:
    """The names of the stored tensors that the values of this one come from."""
    if not isinstance(tensor, PendingTensor):
        return
    if isinstance(tensor.recipe, Rows):
        yield tensor.recipe.name
        return
    for each in tree_leaves(_both(tensor.recipe)):
        if isinstance(each, Tensor):
            yield from sources(each)


def _both(operation: Operation) -> tuple[list[object], dict[str, object]]:
    return list(operation.arguments), dict(operation.keywords)


def _without_values(value: object) -> object:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _recipes(
    function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], made: Sequence[Tensor]
) -> list[Rows | Operation]:
    """How each result is read: as rows of a file where that is possible."""
    given = arguments[0]
    if function in _PIECES and isinstance(given.recipe, Rows) and _dimension(arguments) == 0:
        starts = [given.recipe.start]
        for each in made:
            starts.append(starts[-1] + each.shape[0])
        return [Rows(given.recipe.name, start, stop) for start, stop in pairwise(starts)]
    return [Operation(function, arguments, keywords, number) for number in range(len(made))]


def _dimension(arguments: Sequence[Any]) -> int:
    return cast(int, arguments[2]) if len(arguments) > 2 else 0


def _proportional(length: int, sizes: Sequence[int]) -> list[int]:
    """Sizes that add up to `length`, in the proportion that was asked for.

    Conversion functions of diffusers contain the widths of published models. A model of another width is divided in the same
    proportion; where that does not fit it, shapes differ from those of the model, which is checked.
    """
    total = sum(sizes)
    if total == length or any(size * length % total for size in sizes):
        return list(sizes)
    return [size * length // total for size in sizes]
