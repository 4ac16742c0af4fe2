"""The entries that plugins register, the commands that they add, and what a strategy takes on each rank.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, cast

import click

from smalti.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which plugin something comes from, for messages."""

    plugin: str = "core"
    distribution: str = "smalti"
    version: str = ""
    built_in: bool = True

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({' '.join(filter(None, (self.distribution, self.version)))})"

    @property
    def workaround(self) -> str:
        """What a user can do about a defect of the plugin. Built-in plugins cannot be disabled or updated by themselves."""
        if self.built_in:
            return "report this as a defect of smalti"
        return f"update {self.distribution}, or disable the plugin with --without {self.plugin}"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Base of the entries that plugins register. `title` is shown to users. smalti sets `origin`; plugins leave it out."""

    kind: ClassVar[str]
    """What messages call such an entry, with an article."""
    name: str
    title: str
    origin: Origin = field(default=Origin(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class FamilyEntry(Registered):
    """A model family for `--model_family`.

    `factory` is "module:callable", imported only when the family is chosen. The callable takes the `Config` and returns a
    `smalti.models.ModelFamily`. `flavours` maps each variant to the path or hub id of its weights; it is empty if there is only
    one. `gated` are those of these ids that need an account which has accepted their terms. `downloads` means that the factory
    may download weights; it is then called after all other checks of the configuration.
    """

    kind = "the model family"
    factory: str
    flavours: Mapping[str, str] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    downloads: bool = False


@dataclass(frozen=True, kw_only=True)
class StorageEntry(Registered):
    """A storage of datasets, such as local folders. `name` is the value of the key `type` of a dataset.

    `factory` is "module:callable". The callable takes the `DatasetSpec` and returns a `smalti.data.Storage`. `keys` are the
    keys of its own that a dataset of this type may have. Their values are in the `storage_options` of the spec.

    `open_run`, "module:callable" too, takes a URL with one of the `schemes`, such as "s3", and returns the
    `smalti.checkpoint.RunPlace` there: `smalti_data.remote.place.RemotePlace` is one for any storage. With it,
    `smalti checkpoint` and `--resume_from_checkpoint` take such URLs in place of paths. The second argument is the `Config`
    of a run that resumes; None for other commands.
    """

    kind = "the storage"
    factory: str
    keys: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    open_run: str = ""


@dataclass(frozen=True, kw_only=True)
class MetadataEntry(Registered):
    """A source of file names, image sizes and captions. `name` is the value of the key `metadata_backend` of a dataset.

    `factory` is "module:callable". The callable takes the `DatasetSpec` and the `Storage` and returns a
    `smalti.data.MetadataSource`.
    """

    kind = "the metadata backend"
    factory: str


@dataclass(frozen=True, kw_only=True)
class ColumnEntry(Registered):
    """A column of batches: what datasets have for each image beside the image and its captions, such as a mask.

    `name` is its name in the columns of a `smalti.data.MicroBatch`. Both others are "module:callable". `keys` is a subclass of
    `smalti.data.ColumnKeys`: the keys of a dataset entry that belong to the column. `factory` is called for a dataset with at
    least one of them: it takes its `DatasetSpec`, these keys, the `smalti.data.Catalog` and the specs of all datasets, and
    returns a `smalti.data.Column`. It is called in the launcher and on every rank, and reads no file.
    """

    kind = "the column"
    keys: str
    factory: str


@dataclass(frozen=True, kw_only=True)
class ScanEntry(Registered):
    """A scan of the datasets by all ranks together. With `encode` an engine: processes of its own, for commands without ranks.

    All are "module:callable" and take the `Config` and the `Plugins`; `wanted` and `scan` also the path of the run's `data`
    folder. `wanted` says in the launcher whether the ranks will scan, rather than the launcher before it starts them; an engine
    has none. `scan` is called on every rank if this attempt of the run has no indexes yet, and is *collective*. It also takes
    the `Communicator`, and a function to call on the main rank, `smalti.data.scan_data` without its `build`. Returns the
    notices, on the main rank.

    `encode` fills the caches of latents and texts, for `smalti cache encode`. It also takes a function that shows a notice, and
    returns a `smalti_cache.encode_part.EncodedPart`.
    """

    kind = "the scan"
    wanted: str = ""
    scan: str
    encode: str = ""


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Registered):
    """An optimizer for `--optimizer`.

    `factory` is "module:callable", called as `factory(named_parameters, lr=..., **settings)`. `accepts` names the settings that
    it takes in addition to `lr`: some of `betas`, `eps` and `weight_decay`.

    `shards` says whether the optimizer works on sharded parameters (DTensors), `flat` whether it works on flat slices of
    parameters, as an elementwise optimizer does. An optimizer that does not work with the chosen strategy is refused before
    launch. `state_bytes` is the size of its state for each parameter that trains, for `smalti plan`; None if unknown. `factors`
    counts the rows and columns that it also keeps, in fp32, of each tensor: over its last two dimensions, or, if
    `factors_flattened` says so and it is less, over the first one and all others together. `averages`: it has an `average` of
    the weights, which checkpoints hold as an EMA.
    """

    kind = "the optimizer"
    factory: str
    state_bytes: float | None = None
    factors: int = 0
    factors_flattened: bool = False
    averages: bool = False
    accepts: tuple[str, ...] = ("betas", "eps", "weight_decay")
    shards: bool = True
    flat: bool = True


@dataclass(frozen=True, kw_only=True)
class PeriodicEntry(Registered):
    """Work of all ranks between steps, such as generating validation images.

    `factory` is "module:callable". It takes the `Config` and returns a `smalti.training.PeriodicWork`, or None if the
    configuration asks for nothing of it. Between two steps, work with a lower `order` is done first.
    """

    kind = "the periodic work"
    factory: str
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Registered):
    """What a plugin keeps between runs and can create again, for `smalti cache ls` and `smalti cache clear NAME`.

    `factory` is "module:callable" and returns a `smalti.plugins.Cache`. It is called without arguments, or with the
    `Config` if the entry is marked `configured` because an option says where the cache is. `name` may have dashes. Without a
    `factory` these commands do not know the cache.

    `encoder`, "module:callable" too, makes it the cache in which a run keeps what it encodes before training. It takes the
    `Config`, the `ModelFamily` and the `Catalog` of storages, and returns a `smalti.data.DataEncoder`.

    `order`, "module:callable" too, takes the `Config` and returns an order of samples in which that cache is cheap to read, a
    `smalti.data.Passes`; None permutes all samples. It is called in the launcher too, and imports no torch.
    """

    kind = "the cache"
    factory: str = ""
    configured: bool = False
    encoder: str = ""
    order: str = ""


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """The number of entries and of bytes that clearing a cache removed."""

    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat(Registered):
    """A format of checkpoints that `smalti checkpoint convert` reads.

    `marks` are glob patterns such as "manifest.json" or "*/model_states.pt". A folder in which a file matches one of them is
    read as this format. `factory` is "module:callable", imported only in the process that reads such a checkpoint. The callable
    takes the folder, a `Path`, and returns a `smalti.checkpoint.Source`.
    """

    kind = "the checkpoint format"
    marks: tuple[str, ...]
    factory: str


class Deferred(click.Command):
    """A command that is imported when it is used. `section` is its heading in the list of commands; empty: "From plugins"."""

    def __init__(self, address: str, summary: str, section: str) -> None:
        super().__init__(address.rpartition(":")[2].strip("_").replace("_", "-"), help=summary, short_help=summary)
        self.address, self.section = address, section

    def load(self) -> click.Command:
        """The command itself."""
        return cast(click.Command, resolve_name(self.address))

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        return self.load().make_context(*arguments, **settings)


class CommandCollector(click.Group):
    """The group that `register_commands` receives. It refuses duplicate names."""

    def __init__(self, group: str = "") -> None:
        super().__init__(group)
        self.groups: dict[str, CommandCollector] = {}
        """What `below` returned, by the name of the group."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name
        if name in self.commands:
            path = f"{self.name} {name}".lstrip()
            raise UserError(f"the command {path!r} already exists", fix="disable the plugin with --without")
        super().add_command(cmd, name)

    def add_deferred(self, address: str, summary: str, *, section: str = "") -> None:
        """Add the command at "MODULE:NAME", which is imported when it is used; `summary` stands in the list of commands."""
        self.add_command(Deferred(address, summary, section))

    def below(self, name: str) -> CommandCollector:
        """What takes further subcommands of a group of the core or of another plugin, such as "config"."""
        return self.groups.setdefault(name, CommandCollector(name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.commands.get(cmd_name)
        return command.load() if isinstance(command, Deferred) else command


Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, all but matrix products and attention, or whole blocks."""
Part = Literal["weights", "gradients", "state", "frozen", "activations"]
"""What a rank holds of the parameters that train. "state" is the optimizer's state, EMA and fp32 master weights.

"frozen" are the parameters that do not train, "activations" what a micro-batch keeps for the backward pass.
"""


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
    in addition, while its weight is restored. `multiplied` says that products are computed in it, which rounds their inputs
    too. Such weights can be sharded; `smalti plan` does not offer them, but `--fit` may choose them.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    bytes: int
    restoring: int = 0
    multiplied: bool = False


@dataclass(frozen=True, kw_only=True)
class Strategy(Registered):
    """A way to spread a run over its ranks, with what it takes on each of them.

    `options` select it: values of options, None for those that it needs unset. `recompute` has, for each mode that it
    supports, the options that select that mode. `is_configured`: the configuration asks for it already, whatever the values of
    these options; else smalti compares them. `context` is that of the strategy's `DistributedPlan`.

    `divided` says over how many ranks each part is divided; 1, or a part that is not named, is a whole copy on each rank. A
    strategy that can divide nothing names no part, and is the only kind that trains a model which cannot be sharded.
    `frozen` is the same for parameters that do not train. `bytes` are per parameter that trains, before it is divided.
    `offloaded` parts are in host memory; "frozen" are the parameters of blocks that do not train, but for as many GiB of them
    as the option `resident_gib` in `options` says. With "activations" the device keeps those of a few blocks. With
    `keeps_gradients` the memory of gradients stays allocated between steps. Where they are offloaded, the device may have
    `summed_bytes` per parameter of its part, in which those of several ranks or backward passes are added up from the first
    backward pass to the end of the step.

    A strategy that gathers holds `gathered` copies of its largest block in the forward pass, each of `gathered_bytes` per
    parameter, one in the backward pass, and `reduced_bytes` per parameter of a block whose gradients are being reduced. One
    that does not gather computes in copies of the weights that autocast makes, unless `own_copies` says that its weights are
    in the dtype of the products already.

    `operations` are what its own code dispatches for each tensor that trains, in a step and in a micro-batch: hooks, gathering,
    operations on shards. They are counted in dispatched operations of torch, which take about as long everywhere.
    `buffers` are bytes besides, not more than `buffers_per_parameter` for each parameter that trains: in the backward pass, or
    with `keeps_buffers` always.

    One that is `added_to` plugins is no strategy of its own, but a way to save memory that each of theirs can have in addition,
    in the recomputation modes that both support: its `options`, its `offloaded` parts, its `bytes` in place of the strategy's,
    and its `reduced_bytes` and `buffers` on top. `bytes` are then only those that it changes.
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
    summed_bytes: float = 0
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
    added_to: frozenset[str] = frozenset()
