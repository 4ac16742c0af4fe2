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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti import UserError, World
from smalti.models import Attention, ContextPlan, Join, Split
from smalti_fsdp2.attention import Scope, WholeAttention
from smalti_fsdp2.communication import gather
from smalti_fsdp2.options import CONTEXT_ON_CPU
from smalti_fsdp2.sequences import Layout, part, whole

Forward = Callable[..., object]


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

    The `forward` of the modules that the plan names is replaced, below all hooks: call this before recomputation, compilation
    and sharding, which then contain it. From then on, all ranks of `group` must run the same passes on the same samples.
    """
    streams = Streams(group)
    for attention in plan.attention:
        for path, module in _matching(model, attention.module):
            module.forward = _attending(module.forward, path or "the model", attention, streams, strategy)
    for split in plan.splits:
        for _, module in _matching(model, split.module):
            module.forward = _splitting(module.forward, split, streams)
    for join in plan.joins:
        for _, module in _matching(model, join.module):
            module.forward = _joining(module.forward, join, streams)
    model.forward = _beginning(model.forward, streams)


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


# --- what becomes of a module's forward -----------------------------------------------------------------------------


def _beginning(forward: Forward, streams: Streams) -> Forward:
    """Of the model itself: lengths are those of a new pass."""

    @wraps(forward)
    def first(*arguments: object, **named: object) -> object:
        streams.lengths.clear()
        return forward(*arguments, **named)

    return first


def _attending(forward: Forward, path: str, attention: Attention, streams: Streams, strategy: str) -> Forward:
    @wraps(forward)
    def seeing_all(*arguments: object, **named: object) -> object:
        layout = streams.layout(attention.streams)
        mode = WholeAttention(Scope(module=path, layout=layout, group=streams.group, place=streams.place, strategy=strategy))
        with mode:
            result = forward(*arguments, **named)
        if not mode.calls:
            raise UserError(
                f"attention in {path} would see a part of the tokens: it is not made of torch's scaled_dot_product_attention",
                fix="choose that kind of attention for the model, or --context_parallel_size=1",
            )
        return result

    return seeing_all


def _splitting(forward: Forward, split: Split, streams: Streams) -> Forward:
    def own(value: object) -> object:
        if isinstance(value, Tensor) and split.ndim in (None, value.ndim):
            return streams.split(value, split.stream, split.dim)
        return value

    if isinstance(split.tensor, int):
        return _changing_output(forward, split.tensor, own)
    name = split.tensor
    names = list(signature(forward).parameters)
    if name not in names:
        raise ValueError(
            f"the context plan splits {name!r}, which is not an argument of {split.module or 'the model'}: {names}"
        )
    place = names.index(name)

    @wraps(forward)
    def with_own_part(*arguments: object, **named: object) -> object:
        if name in named:
            named[name] = own(named[name])
        elif place < len(arguments):
            arguments = (*arguments[:place], own(arguments[place]), *arguments[place + 1 :])
        return forward(*arguments, **named)

    return with_own_part


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
