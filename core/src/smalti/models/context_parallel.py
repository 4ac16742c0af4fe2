"""Where the tokens of a model can be split, so that several ranks work on one sample (context parallelism).

A family that can be trained so has a method `context_plan(model) -> ContextPlan | None`. The model itself knows nothing of it.

A stream is a sequence of tokens that is split as one, such as "image" or "text". Every tensor with an entry for each token of a
stream (states, positions, masks) is split with it.

A path names a module of the model, "" the model itself; `*` stands for one part of a path, as in "blocks.*".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from torch import nn

from smalti.errors import UserError
from smalti.models.family import ModelFamily


@dataclass(frozen=True, kw_only=True)
class Split:
    """A tensor of which each rank keeps its part.

    `tensor` is the name of an argument of the module's `forward`, or the number of an output (0 if there is only one). What is
    not given, or None, is left alone, as is what has not `ndim` dimensions where those are said. `dim` is that of the tokens.
    """

    module: str
    tensor: str | int
    stream: str
    dim: int
    ndim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Join:
    """An output of a module that is made whole again on every rank, as if it had never been split."""

    module: str
    stream: str
    dim: int
    output: int = 0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Modules between splitting and joining in which every call of `F.scaled_dot_product_attention` has to see all tokens.

    `streams` are those that its queries and keys hold, in their order. Attention to tokens that are not split, such as a text
    that every rank has whole, is not named here.
    """

    module: str
    streams: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """All of it for one model. `heads` are those of keys and values: strategies that deal out heads need a divisor of it."""

    heads: int
    splits: tuple[Split, ...]
    attention: tuple[Attention, ...]
    joins: tuple[Join, ...]


class SplitsContext(Protocol):
    """What a `ModelFamily` has besides, if its model can be split."""

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """Where to split this model; None if this shape of it cannot be split."""
        ...


def context_plan(family: ModelFamily, model: nn.Module, *, dealt_to: int = 1) -> ContextPlan:
    """The family's plan for its model, whose parameters may be on the meta device.

    Raises UserError if there is none, or if its heads cannot be dealt out to `dealt_to` ranks; 1 if they stay together.
    """
    plan = cast(SplitsContext, family).context_plan(model) if hasattr(family, "context_plan") else None
    if plan is None:
        raise UserError(
            f"{family.name} cannot be trained with context parallelism: the family does not say where its tokens can be split",
            fix="--context_parallel_size=1; FSDP alone also spreads the memory",
        )
    if plan.heads % dealt_to:
        raise UserError(
            f"the {plan.heads} attention heads of the model cannot be dealt out to {dealt_to} ranks",
            fix=f"--context_parallel_comm_strategy=allgather, or a context_parallel_size that divides {plan.heads}",
        )
    return plan
