"""How a run is distributed over ranks. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smalti.types.registered import Registered


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process in the run. `device` is a torch device string such as "cuda:0".

    `context` is the number of consecutive ranks that work on the same samples, each on its part of the sequence (context
    parallelism). Data is distributed over groups of this many ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    device: str = "cpu"
    context: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The data-parallel rank, out of `data_size`: which part of each batch this rank works on."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        return self.size // self.context


@dataclass(frozen=True, kw_only=True)
class DistributedPlan(Registered):
    """How a strategy is launched, and where its `Parallel` is found.

    `parallel` is "module:callable". It is called on every rank as `callable(config)`, joins the process group, and
    returns a `smalti.parallel.Parallel`.

    `accelerate` is merged into the Accelerate YAML, where None removes a key. `environment` is added to the environment of the
    workers. `settings` are the settings of the strategy itself, in JSON's types, for `--dry-run`.

    `context` consecutive ranks work on the same samples, so the effective batch counts such groups. With `splits_heads` each of
    them computes some heads of attention. `shards` means that a rank holds parts of parameters, `flattens_parameters` that the
    optimizer sees them as flat slices: an optimizer that cannot work on those is refused.

    `check_model`, if given, is "module:callable" too. The launcher calls it before it starts a rank, as `callable(config,
    model)` with the family's model on the meta device; it raises UserError for a model that the strategy cannot train.

    `notices` are what the user should know before the launch, in sentences. `smalti plan` prints them too.

    A plan that is marked `fallback` is used when no other plugin returns a plan.
    """

    kind = "the strategy"
    parallel: str
    accelerate: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    context: int = 1
    splits_heads: bool = False
    shards: bool = False
    flattens_parameters: bool = False
    check_model: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    notices: Sequence[str] = ()
    fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class LaunchEntry(Registered):
    """Where and how the ranks of a launch start, if there is more to it than the ranks of one node.

    `site` is "module:callable", imported in the launcher only. It is called with fields of `smalti.launch.LaunchSite` by name,
    up to `write`, and returns one.
    """

    kind = "the launch"
    site: str


@dataclass(frozen=True, kw_only=True)
class Block:
    """A repeated module of the model: the unit of sharding, activation checkpointing and compilation.

    `path` is the module's name in the model. `parameters` counts all parameters in it. With `reshard` false, its parameters
    stay gathered between forward and backward, which is useful for the last block.
    """

    path: str
    class_name: str
    parameters: int
    reshard: bool = True
