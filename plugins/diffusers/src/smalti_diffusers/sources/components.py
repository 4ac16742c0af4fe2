"""A pipeline's folder in diffusers' layout: what its parts are, their configurations, their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from torch import nn

from smalti import UserError
from smalti.models import FolderWeights

INDEX = "model_index.json"
_FILES = (INDEX, "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "*/*.jinja")
"""What is fetched from the hub: no pickles, no images, and no second copy of the weights in one large file at the top."""
_VARIANTS = ("*.fp16*", "*.bf16*")
"""Nor copies in another type; the trained model's weights are read as they were published."""


def locate(name: str, revision: str | None) -> Path:
    """The folder of a pipeline: a local one as it is, a hub id by way of the hub's cache.

    Raises UserError when it is neither, or is no pipeline.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        path = _fetch(name, revision)
    if not (path / INDEX).is_file():
        raise UserError(
            f"{path} is not a pipeline in diffusers' layout: it has no {INDEX}",
            fix="name the folder that holds model_index.json and the folders of the parts",
        )
    return path


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_VARIANTS)))
    except HFValidationError as error:
        raise UserError(f"{name} is neither a folder nor a hub id", fix="name a folder in diffusers' layout") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} is not a local folder, and the download from the Hugging Face Hub failed: {reason}",
            fix="`hf auth login` and accept the model's terms on its page; check the network; or name a local folder",
        ) from error


_PICKLES = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5"))
"""Weights in other formats than safetensors, most of which can run code."""


class Components:
    """The parts of one pipeline. Nothing is loaded before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.pipeline = str(index["_class_name"])
        self.settings = {name: value for name, value in index.items() if name[0] != "_" and not isinstance(value, list)}
        """Arguments of the pipeline's constructor other than its components."""
        self._classes = {name: value for name, value in index.items() if isinstance(value, list) and value[0] is not None}

    def has(self, part: str) -> bool:
        return part in self._classes

    def kind(self, part: str) -> str | None:
        """The name of a part's class; None if there is no such part."""
        return self._classes[part][1] if part in self._classes else None

    def config(self, part: str) -> dict[str, object]:
        """The configuration of a part, as its file has it."""
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        return cast(dict[str, object], json.loads((self.folder / part / name).read_text(encoding="utf-8")))

    def build(self, part: str) -> nn.Module:
        """A model of diffusers from its configuration alone, with the weights that its constructor makes."""
        model = self._class(part).from_config(self.config(part))  # type: ignore[attr-defined]
        assert isinstance(model, nn.Module)
        return model

    def weights(self, part: str) -> FolderWeights:
        return FolderWeights(self.folder / part)

    def load(self, part: str, dtype: torch.dtype | None = None) -> object:
        """A frozen part with its weights, in eval mode, without gradients; or a tokenizer or scheduler."""
        extra = {} if dtype is None else {"torch_dtype": dtype}
        loaded = self._class(part).from_pretrained(self.folder / part, **extra)  # type: ignore[attr-defined]
        if isinstance(loaded, nn.Module):
            loaded.requires_grad_(False).eval()
        return cast(object, loaded)

    def files(self, part: str) -> Iterator[Path]:
        """The files of a part, relative to the pipeline's folder: without pickles, and without weights in another precision.

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
        yield from (path for path in shown if path.suffix not in _PICKLES and not _is_variant(path.name))

    def identity(self, part: str) -> dict[str, object]:
        """What identifies a part, whatever its path: configuration and digest of the weights, or digests of its files."""
        files = list(self.files(part))
        if any(path.suffix == ".safetensors" for path in files):
            config = {key: value for key, value in self.config(part).items() if key == "_class_name" or key[0] != "_"}
            return {"config": config, "weights": self.weights(part).digest()}
        return {path.as_posix(): sha256((self.folder / path).read_bytes()).hexdigest() for path in files}

    def parts(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def _class(self, part: str) -> type:
        if part not in self._classes:
            raise UserError(f"{self.folder} has no {part}", fix=f"it is a {self.pipeline}; is that the right family?")
        library, name = self._classes[part]
        return class_of(library, name)


def class_of(library: str, name: str) -> type:
    """A class of diffusers or transformers, with libraries that keep quiet from before it is imported."""
    _hush()
    return cast(type, getattr(import_module(library), name))


@cache
def _hush() -> None:
    """No progress bars and no notices of the libraries in a user's terminal, such as one for each caption that is cut short."""
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    for library in (diffusers, transformers):
        library.set_verbosity_error()
        library.disable_progress_bar()


def _is_variant(name: str) -> bool:
    """`model.fp16.safetensors`, `model.safetensors.index.fp16.json`: the same weights once more."""
    _, _, rest = name.partition(".")
    return rest.endswith(".safetensors") or (rest.startswith("safetensors.index.") and rest != "safetensors.index.json")
