"""Context parallelism: several ranks work on the tokens of one sample, each on its part of them.

Where a model's tokens are split and made whole again says its family, in a `ContextPlan`. In between, everything that treats
tokens alike needs nothing; attention is made to see all of them.

Gradients need no care beyond FSDP's mean over all ranks. The way back through joining and through attention sums what all C
ranks of a group made of a token, and each rank has a part of the tokens. So the mean over the C ranks of a parameter's gradient
is the gradient of the mean of their losses, wherever the parameter is used: before splitting, in between, or after joining.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti import UserError, World
from smalti.models import Attention, ContextPlan, Join, Split
from smalti_fsdp2.attention import Scope, attend
from smalti_fsdp2.communication import gather
from smalti_fsdp2.options import CONTEXT_ON_CPU
from smalti_fsdp2.rebinding import Rebinding
from smalti_fsdp2.sequences import Layout, part, whole

Forward = Callable[..., object]
Arguments = tuple[object, ...]


def context_group(world: World, timeout: timedelta) -> dist.ProcessGroup:
    """The `world.context` neighbouring ranks that share this rank's samples. *Collective*, over all ranks."""
    kind = torch.device(world.device).type
    if kind != "cuda" and not (kind == "cpu" and os.environ.get(CONTEXT_ON_CPU)):
        raise UserError(
            f"context parallelism needs CUDA devices, and rank {world.rank} is on {world.device}",
            fix="--context_parallel_size=1, or check the GPU driver (nvidia-smi)",
        )
    group: dist.ProcessGroup = dist.new_subgroups(world.context, timeout=timeout)[0]  # type: ignore[no-untyped-call]
    return group


def split_context(model: nn.Module, plan: ContextPlan, group: dist.ProcessGroup, strategy: str) -> None:
    """Make `model`, which may be on the meta device, work on this rank's part of the tokens.

    Attention and what joins tokens is replaced in the modules, below all hooks: call this before recomputation, compilation
    and sharding, which then contain it. Inputs are split by hooks, outside of all that. From then on, all ranks of `group` must
    run the same passes on the same samples.
    """
    streams = Streams(group)
    model.register_forward_pre_hook(lambda module, arguments: streams.lengths.clear())  # a new pass, before its first split
    for attention in plan.attention:
        whole_attention = WholeAttention(attention, streams, strategy)
        for _, module in _matching(model, attention.module):
            whole_attention.replace_in(module)
    for split in plan.splits:
        for _, module in _matching(model, split.module):
            _split_at(module, split, streams)
    for join in plan.joins:
        for _, module in _matching(model, join.module):
            module.forward = _joining(module.forward, join, streams)


class Streams:
    """The sequences of the forward pass that is under way, and this rank's place among those that share them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.place = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.lengths: dict[str, int] = {}
        """Kept until the next forward pass, because recomputing needs them too."""

    def split(self, tensor: Tensor, stream: str, dim: int) -> Tensor:
        length = tensor.shape[dim]
        if self.lengths.setdefault(stream, length) != length:
            raise RuntimeError(f"the context plan splits {length} tokens as {stream!r}, which has {self.lengths[stream]}")
        return part(tensor, dim, self.place, self.count)

    def join(self, tensor: Tensor, stream: str, dim: int) -> Tensor:
        return whole(gather(tensor, self.group), dim, self.lengths[stream])

    def layout(self, streams: Sequence[str]) -> Layout:
        if missing := [stream for stream in streams if stream not in self.lengths]:
            raise RuntimeError(f"the context plan has attention to {missing}, which no tensor was split as")
        return Layout(lengths=tuple(self.lengths[stream] for stream in streams), count=self.count)


class WholeAttention:
    """Attention of the modules that one entry of a plan names: it sees the tokens of all ranks."""

    def __init__(self, attention: Attention, streams: Streams, strategy: str) -> None:
        self._module = attention.module or "the model"
        self._names = attention.streams
        self._streams = streams
        self._strategy = strategy
        self._calls = 0
        self._rebinding = Rebinding(self._attend)

    def replace_in(self, module: nn.Module) -> None:
        if not self._rebinding.apply(module):
            raise self._unseen()
        module.forward = self._checked(module.forward)

    def _attend(self, *arguments: Any, **named: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            self._calls += 1
        layout, group, place = self._streams.layout(self._names), self._streams.group, self._streams.place
        scope = Scope(module=self._module, layout=layout, group=group, place=place, strategy=self._strategy)
        return attend(scope, *arguments, **named)

    def _checked(self, forward: Forward) -> Forward:
        """That it takes the way that was changed; compiled code takes those that its first pass takes."""

        @wraps(forward)
        def checked(*arguments: object, **named: object) -> object:
            if torch.compiler.is_compiling():
                return forward(*arguments, **named)
            before = self._calls
            result = forward(*arguments, **named)
            if self._calls == before:
                raise self._unseen()
            return result

        return checked

    def _unseen(self) -> UserError:
        return UserError(
            f"attention in {self._module} would see a part of the tokens: it is not made of torch's"
            " scaled_dot_product_attention",
            fix="choose that kind of attention for the model, or --context_parallel_size=1",
        )


# --- what becomes of a module -----------------------------------------------------------------------------


def _split_at(module: nn.Module, split: Split, streams: Streams) -> None:
    def own(value: object) -> object:
        if isinstance(value, Tensor) and split.ndim in (None, value.ndim):
            return streams.split(value, split.stream, split.dim)
        return value

    if isinstance(split.tensor, int):
        module.forward = _changing_output(module.forward, split.tensor, own)
        return
    name = split.tensor
    names = list(signature(module.forward).parameters)
    if name not in names:
        raise ValueError(
            f"the context plan splits {name!r}, which is not an argument of {split.module or 'the model'}: {names}"
        )
    place = names.index(name)

    def with_own_part(module: nn.Module, arguments: Arguments, named: dict[str, object]) -> tuple[Arguments, dict[str, object]]:
        if name in named:
            named = {**named, name: own(named[name])}
        elif place < len(arguments):
            arguments = (*arguments[:place], own(arguments[place]), *arguments[place + 1 :])
        return arguments, named

    # A hook, because lengths are kept for later: what is computed again, and compiled, may change nothing outside.
    module.register_forward_pre_hook(with_own_part, with_kwargs=True)


def _joining(forward: Forward, join: Join, streams: Streams) -> Forward:
    def made_whole(value: object) -> object:
        assert isinstance(value, Tensor), f"the context plan joins an output of {join.module} that is a {type(value).__name__}"
        return streams.join(value, join.stream, join.dim)

    return _changing_output(forward, join.output, made_whole)


def _changing_output(forward: Forward, number: int, change: Callable[[object], object]) -> Forward:
    @wraps(forward)
    def changed(*arguments: object, **named: object) -> object:
        result = forward(*arguments, **named)
        if not isinstance(result, tuple | list):
            return change(result)
        return (*result[:number], change(result[number]), *result[number + 1 :])

    return changed


def _matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a path of the plan names."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [(path, module) for path, module in model.named_modules() if wanted.fullmatch(path)]
    if not found:
        raise ValueError(f"the context plan speaks of {pattern!r}, and the model has no such module")
    yield from found
