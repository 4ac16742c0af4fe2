"""What a strategy takes on each rank, for `smalti plan`. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from smalti.types.registered import Registered

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, all but matrix products and attention, or whole blocks."""
Part = Literal["weights", "gradients", "state"]
"""What a rank holds of the parameters that train. "state" is the optimizer's state, EMA and fp32 master weights."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One kind of collective operation. Bytes are those that one rank sends.

    `bytes_per_parameter` counts all parameters of the model, or with `of="trained"` those that train. `ranks` form a group;
    `between_nodes` says that such a group spans nodes. `times` is how often in each optimizer step: once in it, or for each
    micro-batch.
    """

    collective: Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast"]
    bytes_per_parameter: float
    ranks: int
    of: Literal["all", "trained"] = "all"
    times: Literal["step", "micro-batch"] = "micro-batch"
    between_nodes: bool = False


@dataclass(frozen=True, kw_only=True)
class FrozenStorage:
    """One way to keep the frozen weights of a model: `options` select it.

    `bytes` are those of all frozen weights of the model, `restoring` those that the computation of one layer needs at most
    in addition, while its weight is restored.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    bytes: int
    restoring: int = 0


@dataclass(frozen=True, kw_only=True)
class Strategy(Registered):
    """A way to spread a run over its ranks, with what it takes on each of them.

    `options` select it: values of options, None for those that it needs unset. `recompute` has, for each mode that it
    supports, the options that select that mode. `is_configured`: the configuration asks for it already, whatever the values of
    these options; else smalti compares them. `context` is that of the strategy's `DistributedPlan`.

    `divided` says over how many ranks each part is divided; 1, or a part that is not named, is a whole copy on each rank. A
    strategy that can divide nothing names no part, and is the only kind that trains a model which cannot be sharded.
    `frozen` is the same for parameters that do not train. `bytes` are per parameter that trains, before it is divided.
    `offloaded` parts are in host memory. With `keeps_gradients` their memory stays allocated between steps.

    A strategy that gathers holds `gathered` copies of its largest block in the forward pass, each of `gathered_bytes` per
    parameter, one in the backward pass, and `reduced_bytes` per parameter of a block whose gradients are being reduced. One
    that does not gather computes in copies of the weights that autocast makes, unless `own_copies` says that its weights are
    in the dtype of the products already.

    With `can_be_rehearsed` false its code does not run without the other ranks, and only formulas count it.
    `operations` are what its own code dispatches for each tensor that trains, in a step and in a micro-batch: hooks, gathering,
    operations on shards. They are counted in dispatched operations of torch, which take about as long everywhere.
    `buffers` are bytes besides, not more than `buffers_per_parameter` for each parameter that trains: in the backward pass, or
    with `keeps_buffers` always.
    """

    kind: ClassVar[str] = "the strategy"
    options: Mapping[str, object]
    is_configured: bool = False
    recompute: Mapping[Recompute, Mapping[str, object]] = field(default_factory=lambda: {"none": {}})
    divided: Mapping[Part, int] = field(default_factory=dict)
    frozen: int = 1
    bytes: Mapping[Part, float] = field(default_factory=lambda: {"weights": 4, "gradients": 4, "state": 0})
    offloaded: frozenset[Part] = frozenset()
    keeps_gradients: bool = False
    gathered: int = 0
    gathered_bytes: float = 0
    reduced_bytes: float = 0
    own_copies: bool = False
    operations: Mapping[Literal["step", "micro-batch"], float] = field(default_factory=dict)
    buffers: int = 0
    buffers_per_parameter: float = 0
    keeps_buffers: bool = False
    communication: tuple[Communication, ...] = ()
    context: int = 1
    can_be_rehearsed: bool = True
