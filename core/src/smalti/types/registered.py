"""The entries that plugins register. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


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
    one. `downloads` means that the factory may download weights; it is then called after all other checks of the configuration.
    """

    kind = "the model family"
    factory: str
    flavours: Mapping[str, str] = field(default_factory=dict)
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
    `smalti.data.datasets.sources.MetadataSource`.
    """

    kind = "the metadata backend"
    factory: str


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Registered):
    """An optimizer for `--optimizer`.

    `factory` is "module:callable", called as `factory(named_parameters, lr=..., **settings)`. `accepts` names the settings that
    it takes in addition to `lr`: some of `betas`, `eps` and `weight_decay`.

    `shards` says whether the optimizer works on sharded parameters (DTensors), `flat` whether it works on flat slices of
    parameters, as an elementwise optimizer does. An optimizer that does not work with the chosen strategy is refused before
    launch. `state_bytes` is the size of its state for each parameter that trains, for `smalti plan`; None if unknown.
    """

    kind = "the optimizer"
    factory: str
    state_bytes: float | None = None
    accepts: tuple[str, ...] = ("betas", "eps", "weight_decay")
    shards: bool = True
    flat: bool = True


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Registered):
    """What a plugin keeps between runs and can create again, for `smalti cache ls` and `smalti cache clear NAME`.

    `factory` is "module:callable" and returns a `smalti.plugins.caches.Cache`. It is called without arguments, or with the
    `Config` if the entry is marked `configured` because an option says where the cache is. `name` may have dashes.

    The factory of an entry marked `divided` takes the `Config`, or None without one, and the `Plugins`, and returns a
    `smalti.plugins.DividedCache`.

    `encoder`, "module:callable" too, makes it the cache in which a run keeps what it encodes before training. It takes the
    `Config`, the `ModelFamily` and the `Catalog` of storages, and returns a `smalti.data.DataEncoder`.
    """

    kind = "the cache"
    factory: str
    configured: bool = False
    divided: bool = False
    encoder: str = ""


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
