"""Equal blocks of a model are counted once: what the second of a kind did is added for each that comes after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from smalti_plan.counting import Saved


@contextmanager
def repeated_blocks(saved: Saved, counter: FlopCounterMode, blocks: Mapping[str, nn.Module]) -> Iterator[Repeated]:
    """Inside, the third block of a kind and those after it do not run: they return new tensors like those of the second.

    A kind is what `Saved` tells apart: class, sizes of weights, inputs. The first of a kind is no example for others: it alone
    keeps what all of them share. `flops` of what is yielded are those that `counter` did not see.
    """
    repeated = Repeated(saved, counter)
    before = {path: module.__dict__.get("forward") for path, module in blocks.items()}
    for path, module in blocks.items():
        module.forward = wraps(module.forward)(partial(repeated.forward, path, module.forward))
    try:
        yield repeated
    finally:
        for path, module in blocks.items():
            del module.forward
            if (own := before[path]) is not None:
                module.forward = own


class Repeated:
    def __init__(self, saved: Saved, counter: FlopCounterMode) -> None:
        self.flops = 0
        self._saved = saved
        self._counter = counter
        self._times: Counter[object] = Counter()
        self._passes: dict[object, _Pass] = {}

    def forward(self, path: str, own: Any, *args: object, **kwargs: object) -> object:
        kind = self._saved.kinds[path]
        self._times[kind] += 1
        if self._times[kind] == 2:
            return self._recorded(path, kind, own, args, kwargs)
        known = self._passes.get(kind)
        return own(*args, **kwargs) if known is None else self._again(path, known, tree_leaves((args, kwargs)))

    def _recorded(self, path: str, kind: object, own: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        saved, counter = self._saved, self._counter
        operations, flops = saved.operations, int(counter.get_total_flops())
        result = own(*args, **kwargs)
        after = saved.operations
        leaves, spec = tree_flatten(result)
        given = tree_leaves((args, kwargs))
        outputs = [_output(each, given) for each in leaves]
        if None not in outputs:
            storages = {id(each.untyped_storage()): each for each in leaves if isinstance(each, Tensor)}
            self._passes[kind] = _Pass(
                spec=spec,
                outputs=[each for each in outputs if each is not None],
                kept={key for key, each in storages.items() if each.untyped_storage() in saved.seen},
                flops=int(counter.get_total_flops()) - flops,
                operations=after - operations,
                counts=[(counts, counts[path]) for counts in (saved.bytes, saved.copied, saved.products)],
            )
        saved.operations = after
        return result

    def _again(self, path: str, known: _Pass, given: Sequence[object]) -> object:
        saved = self._saved
        operations = saved.operations + known.operations
        result = known.results(given, saved)
        saved.operations = operations
        self.flops += known.flops
        for counts, size in known.counts:
            counts[path] += size
        return result


@dataclass(frozen=True, kw_only=True)
class _New:
    """A tensor that a block made. `storage` tells which of its outputs share one."""

    storage: int
    elements: int
    like: Tensor
    requires_grad: bool


def _output(result: object, given: Sequence[object]) -> _New | int | None:
    """What a block returned: a new tensor, or the place among its inputs; None for a view of an input and what is no tensor."""
    if not isinstance(result, Tensor):
        return None
    storage = result.untyped_storage()
    for place, each in enumerate(given):
        if each is result:
            return place
        if isinstance(each, Tensor) and each.untyped_storage() is storage:
            return None
    elements = storage.nbytes() // result.element_size()
    return _New(storage=id(storage), elements=elements, like=result.detach(), requires_grad=result.requires_grad)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    spec: TreeSpec
    outputs: Sequence[_New | int]
    kept: set[int]
    flops: int
    operations: int
    counts: Sequence[tuple[Counter[str], int]]

    def results(self, given: Sequence[object], saved: Saved) -> object:
        bases: dict[int, Tensor] = {}
        found: list[object] = []
        for each in self.outputs:
            if isinstance(each, int):
                found.append(given[each])
                continue
            like = each.like
            if each.storage not in bases:
                bases[each.storage] = _base(each.elements, like.dtype, each.requires_grad)
                if each.storage in self.kept:
                    saved.seen.add(bases[each.storage].untyped_storage())
            found.append(bases[each.storage].as_strided(like.shape, like.stride(), like.storage_offset()))
        return tree_unflatten(found, self.spec)


def _base(elements: int, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    new = torch.empty(elements, dtype=dtype, requires_grad=requires_grad)
    return cast(Tensor, _Computed.apply(new)) if requires_grad else new  # type: ignore[no-untyped-call]


class _Computed(torch.autograd.Function):
    """A tensor that is no leaf, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_like(leaf)
