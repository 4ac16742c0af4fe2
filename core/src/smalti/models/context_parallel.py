"""Where the tokens of a model can be split, so that several ranks work on one sample (context parallelism).

A family whose model can be trained so overrides `context_plan`. The model itself knows nothing of it.

A stream is a sequence of tokens that is split as one, such as "image" or "text". Every tensor with an entry for each token of a
stream (states, positions, masks) is split with it.

A path names a module of the model, "" the model itself; `*` stands for one part of a path, as in "blocks.*".
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """An output of a module that is gathered again on every rank, as if it had never been split."""

    module: str
    stream: str
    dim: int
    output: int = 0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Modules between splitting and joining in which every call of `F.scaled_dot_product_attention` has to see all tokens.

    `streams` are those that its queries and keys hold, in their order. Attention to tokens that are not split, such as a text
    of which every rank has all tokens, is not named here.
    """

    module: str
    streams: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """All of it for one model. `heads`: those of keys and values; strategies that split heads over ranks need a divisor."""

    heads: int
    splits: tuple[Split, ...]
    attention: tuple[Attention, ...]
    joins: tuple[Join, ...]
