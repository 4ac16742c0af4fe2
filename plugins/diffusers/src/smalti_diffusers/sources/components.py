"""A pipeline in diffusers' layout: what its parts are, their configurations, their weights. Parts may come from elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import torch
from torch import nn

from smalti import UserError
from smalti.checkpoint import DTYPES, Computed, StoredTensor
from smalti.models import (
    Weights,
    is_dry_run,
    materialise,
    without_weights,
)
from smalti.system import load_json, read_regular
from smalti_diffusers.sources.location import INDEX, index_of
from smalti_diffusers.sources.weight_files import folder_weights, plain_name, variant_of, weight_files, weight_map

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder

_PICKLES = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5"))
"""Weights in other formats than safetensors, most of which can run code."""


class PartWeights(Weights, Protocol):
    """Weights that tell types, shapes and a digest without being read: `FolderWeights`, or those of a single file."""

    def stored(self, name: str) -> StoredTensor: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A part that does not come from the pipeline's folder. `config` is None if it has the configuration of the folder's."""

    weights: PartWeights
    config: Mapping[str, object] | None = None


class Components:
    """The parts of one pipeline. Nothing is loaded before it is asked for.

    `folder` is a pipeline in diffusers' layout. `replaced` are parts whose weights come from elsewhere, by name. `variant`
    chooses among weight files such as `model.fp16.safetensors`; None takes plain names, or the only variant. `scheduler` is
    what the configuration of the scheduler has to say otherwise. `missing` is the hub id whose weights are not on
    this machine, in a dry run; "" if they are.
    """

    def __init__(
        self,
        folder: Path,
        replaced: Mapping[str, Replacement] | None = None,
        *,
        variant: str | None = None,
        scheduler: Mapping[str, object] | None = None,
        missing: str = "",
    ) -> None:
        self.folder = folder
        self.missing = missing
        self.replaced = dict(replaced or {})
        self._variant = variant
        self._scheduler = dict(scheduler or {})
        self.index = load_json(read_regular(index_of(folder) or folder / INDEX))
        """What lists the parts: model_index.json, or modular_model_index.json."""
        self.pipeline = str(self.index["_class_name"])
        self.settings = {name: value for name, value in self.index.items() if name[0] != "_" and not _is_part(value)}
        """Arguments of the pipeline's constructor other than its components."""
        listed = {name: _library_and_class(value) for name, value in self.index.items() if _is_part(value)}
        self._classes = {name: (library, kind) for name, (library, kind) in listed.items() if library is not None}

    @property
    def is_modular(self) -> bool:
        """Whether it is a modular pipeline, which diffusers loads by another class."""
        return "_blocks_class_name" in self.index

    def has(self, part: str) -> bool:
        return part in self._classes

    def kind(self, part: str) -> str | None:
        """The name of a part's class; None if there is no such part."""
        return self._classes[part][1] if part in self._classes else None

    def config(self, part: str) -> dict[str, object]:
        """The configuration of a part, as its file has it."""
        if (other := self.replaced.get(part)) is not None and other.config is not None:
            return dict(other.config)
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        found = cast(dict[str, object], load_json(read_regular(self.folder / part / name)))
        return found | self._scheduler if part == "scheduler" else found

    def build(self, part: str) -> nn.Module:
        """A model from its configuration alone, with the weights that its constructor makes."""
        kind = self._class(part)
        if self.library(part) == "transformers":
            config = kind.config_class.from_pretrained(self.folder / part)  # type: ignore[attr-defined]
            model = kind(config)
        else:
            model = kind.from_config(self.config(part))  # type: ignore[attr-defined]
        assert isinstance(model, nn.Module)
        return model

    def lacks_weights(self, part: str) -> bool:
        """Whether a part is to be described by its configuration alone: in a dry run."""
        return is_dry_run() or (bool(self.missing) and part not in self.replaced)

    def weights(self, part: str) -> PartWeights:
        """Raises UserError if there are none, or a file is damaged."""
        if part in self.replaced:
            return self.replaced[part].weights
        return folder_weights(self.folder / part, self._variant)

    def load(self, part: str, dtype: torch.dtype | None = None) -> object:
        """A frozen part with its weights, in eval mode, without gradients; or a tokenizer or scheduler."""
        loaded: object
        if part not in self.replaced and part in self._classes and not (self.folder / part).is_dir():
            raise UserError(
                f"{self.folder} has no files of {part}",
                fix="they are downloaded when a run starts; or name a folder with the whole pipeline",
            )
        if self.lacks_weights(part) and issubclass(self._class(part), nn.Module):
            with _default_dtype(dtype):  # as what is read in it: no part is there in another type first
                loaded = self.build(part)
        elif part in self.replaced:
            with without_weights():
                model = self.build(part).to(dtype)
            loaded = materialise(model, self.replaced[part].weights, "cpu")
        else:
            extra: dict[str, object] = {} if dtype is None else {"dtype": dtype}
            if (variant := self._variant_of(part)) is not None:
                extra["variant"] = variant
            loaded = self._class(part).from_pretrained(self.folder / part, **extra)  # type: ignore[attr-defined]
        if isinstance(loaded, nn.Module):
            loaded.requires_grad_(False).eval()
        return loaded

    def files(self, part: str) -> Iterator[Path]:
        """The files of a part, relative to the pipeline's folder: without pickles, and without weights in another variant.

        Raises UserError when the weights of the part are pickles only.
        """
        found = sorted(path.relative_to(self.folder) for path in (self.folder / part).rglob("*") if path.is_file())
        shown = [path for path in found if not any(name.startswith(".") for name in path.parts)]
        pickled = [path for path in shown if path.suffix in _PICKLES]
        if pickled and not any(path.suffix == ".safetensors" for path in shown):
            raise UserError(
                f"{self.folder / pickled[0]} is a pickle, and there are no safetensors beside it",
                fix="convert it to safetensors first, or take a pipeline that has them",
            )
        variant = self._variant_of(part)
        kept = [path for path in shown if path.suffix not in _PICKLES]
        yield from (path for path in kept if not _is_weights(path.name) or variant_of(path.name) == variant)

    def identity(self, part: str) -> dict[str, object]:
        """What identifies a part, whatever its path: configuration and digest of the weights, or digests of its files."""
        files = list(self.files(part))
        if part in self.replaced or any(path.suffix == ".safetensors" for path in files):
            config = {key: value for key, value in self.config(part).items() if key == "_class_name" or key[0] != "_"}
            return {"config": config, "weights": self.weights(part).digest()}
        return {path.as_posix(): sha256((self.folder / path).read_bytes()).hexdigest() for path in files}

    def parts(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def models(self) -> Iterator[str]:
        """The parts that have weights."""
        for part in self._classes:
            if part in self.replaced or (self.folder / part / "config.json").is_file():
                yield part

    def library(self, part: str) -> str:
        """The module that has the class of a part: "diffusers" or "transformers"."""
        return self._classes[part][0]

    def check_weights(self, skip: str | None = None) -> None:
        """Raises UserError if a part has no weights, or a file of them is missing or damaged. Reads headers; skips one part."""
        for part in self.models():
            if part != skip and not self.lacks_weights(part):
                self.weights(part)

    def export_part(self, part: str, folder: ExportFolder) -> None:
        """Write a frozen part for inference. A variant gets plain names, by which every pipeline finds it."""
        if (other := self.replaced.get(part)) is not None:
            folder.write_model(part, self.config(part), tensors=frozen_tensors(other.weights))
        for path in self.files(part):
            name = f"{part}/{plain_name(path.name)}" if _is_weights(path.name) else path.as_posix()
            if other is not None and (_is_weights(path.name) or path.name == "config.json"):
                continue
            if name.endswith(".json") and name != path.as_posix():  # the index of a variant
                index = load_json(read_regular(self.folder / path))
                places = {tensor: plain_name(file) for tensor, file in weight_map(self.folder / path).items()}
                folder.write_json(name, {**index, "weight_map": places})
            else:
                folder.copy(self.folder / path, name)

    def _variant_of(self, part: str) -> str | None:
        """The variant of a part's weights; None for plain names, and for parts without weights."""
        folder = self.folder / part
        chosen = weight_files((path.name for path in folder.iterdir()), self._variant) if folder.is_dir() else None
        return chosen.variant if chosen is not None else None

    def _class(self, part: str) -> type:
        if part not in self._classes:
            raise UserError(f"{self.folder} has no {part}", fix=f"it is a {self.pipeline}; is that the right family?")
        library, name = self._classes[part]
        return class_of(library, name)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def frozen_tensors(weights: PartWeights, *, fixed: bool = True) -> dict[str, Computed]:
    """Tensors for an export that are read when they are written. They keep their types if `fixed`."""
    return {
        name: Computed(shape=stored.shape, compute=partial(weights.get, name), dtype=DTYPES[stored.dtype], fixed=fixed)
        for name in weights.names()
        if (stored := weights.stored(name))
    }


def _is_part(entry: object) -> TypeGuard[list[Any]]:
    """Of an index: whether it names a part, by its library and class. Other lists are settings: numbers."""
    return isinstance(entry, list) and not isinstance(entry[0], int | float)


def _library_and_class(entry: list[Any]) -> tuple[str | None, str]:
    """Of a part, by its entry in an index. In a modular one, a part that was not loaded has them in its specification only."""
    library, kind, *specification = entry
    if library is None and specification and specification[0]:
        library, kind = specification[0].get("type_hint") or entry[:2]
    return library, kind


def class_of(library: str, name: str) -> type:
    """A class of diffusers or transformers, with libraries that keep quiet from before it is imported."""
    _hush()
    return cast(type, getattr(import_module(library), name))


def _is_weights(name: str) -> bool:
    """Whether this is a file of weights or an index of some."""
    return name.endswith(".safetensors") or ".safetensors.index." in name


@cache
def _hush() -> None:
    """No progress bars and no notices of the libraries in a user's terminal, such as one for each truncated caption."""
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    for library in (diffusers, transformers):
        library.set_verbosity_error()
        library.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")  # by diffusers itself, in its Chroma
