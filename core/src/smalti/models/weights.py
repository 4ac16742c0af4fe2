"""Building a model without weights, and putting first weights into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from smalti.checkpoint import DTYPES, Chunk, read_layout
from smalti.errors import CheckpointError, UserError
from smalti.system import parse_json

_AGAIN = "copy or download it again"
_SAMPLE = 64
"""Bytes that are looked at in each of three places of a tensor, to tell weights apart."""


class Weights(Protocol):
    """Where the first weights come from: a folder of safetensors, or a seeded initialisation.

    Read name by name, so that no rank needs memory for all of a sharded model.
    """

    def names(self) -> Iterator[str]:
        """Names of all parameters and persistent buffers."""
        ...

    def get(self, name: str) -> Tensor:
        """One complete tensor, on the CPU. Raises KeyError for a name that is not there."""
        ...


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules built inside get their parameters on the meta device, where they cost nothing; buffers are real.

    A buffer that a constructor computes could not be filled from a file. Parameters that are shared stay shared.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class SeededWeights:
    """`Weights` as a model's own constructor makes them under a seed; the model is built when the first is asked for."""

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self._build = build
        self._seed = seed
        self._tensors: dict[str, Tensor] | None = None

    def names(self) -> Iterator[str]:
        with without_weights():
            model = self._build()
        return iter(model.state_dict())

    def get(self, name: str) -> Tensor:
        if self._tensors is None:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.default_generator.manual_seed(self._seed)
                self._tensors = self._build().state_dict()
        return self._tensors[name]

    def digest(self) -> str:
        """Tells these weights from others, given the model."""
        return f"seed {self._seed}"


class FolderWeights:
    """`Weights` from a folder of safetensors files in the layout of diffusers and transformers, or from one such file.

    Tensors are read one at a time, headers once: those of large models take long to read. With an index
    (`*.safetensors.index.json`) its files count; without one, all files do but those of a variant (`*.fp16.safetensors`).
    Raises UserError when there is nothing to read.
    """

    def __init__(self, path: Path) -> None:
        self._files = _files_by_name(path)
        self._path = path
        self._layouts: dict[Path, dict[str, tuple[Chunk, int]]] = {}

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def get(self, name: str) -> Tensor:
        path = self._files[name]
        chunk, position = self._layout(path)[name]
        tensor = torch.empty(chunk.shape, dtype=DTYPES[chunk.dtype])
        # Not mapped: what was read would stay in memory as long as any tensor of the file does.
        with path.open("rb") as file:
            file.seek(position)
            if file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != chunk.size:
                raise UserError(f"{path} has become shorter", fix=_AGAIN)
        return tensor

    def _layout(self, path: Path) -> dict[str, tuple[Chunk, int]]:
        """Where the tensors of a file are."""
        if path not in self._layouts:
            self._layouts[path] = _layout_of(path)
        return self._layouts[path]

    def digest(self) -> str:
        """Tells these weights from others: names, types, shapes and a sample of the bytes of every tensor, wherever they lie.

        Cheap for any size. It does not find damage.
        """
        seen = hashlib.sha256()
        for name, path in sorted(self._files.items()):
            chunk, position = self._layout(path)[name]
            seen.update(f"{name} {chunk.dtype} {chunk.shape} ".encode())
            with path.open("rb") as file:
                for place in (0, chunk.size // 2, max(chunk.size - _SAMPLE, 0)):
                    file.seek(position + place)
                    seen.update(file.read(min(_SAMPLE, chunk.size - place)))
        return seen.hexdigest()

    def __str__(self) -> str:
        return str(self._path)


def _layout_of(path: Path) -> dict[str, tuple[Chunk, int]]:
    """Where the tensors of a file are. Raises UserError, which names the file, for one that is cut off or otherwise damaged."""
    try:
        return read_layout(path)
    except CheckpointError as error:
        raise UserError(f"{path} {error.message}", fix=_AGAIN) from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        body = parse_json(index.read_bytes())
    except ValueError as error:
        raise UserError(f"{index} is not valid JSON: {error}", fix=_AGAIN) from error
    match body:
        case {"weight_map": dict(found)} if all(isinstance(file, str) for file in found.values()):
            return found
    raise UserError(f"{index} does not say in which files the weights are: it has no weight_map", fix=_AGAIN)


def _files_by_name(path: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if path.is_dir() and (indexes := sorted(path.glob("*.safetensors.index.json"))):
        found = {name: path / file for name, file in _weight_map(indexes[0]).items()}
    else:
        single = path.is_file()
        files = [path] if single else [each for each in sorted(path.glob("*.safetensors")) if each.name.count(".") == 1]
        found = {}
        for each in files:
            found |= dict.fromkeys(_layout_of(each), each)
    if missing := sorted({file.name for file in found.values() if not file.is_file()}):
        raise UserError(f"{path} lacks {', '.join(missing)}, which its index names", fix=_AGAIN)
    if not found:
        fix = "name a folder that holds *.safetensors files; weights in .bin files are pickles and have to be converted first"
        raise UserError(f"there are no safetensors weights at {path}", fix=fix)
    return found


def first_weight(weights: Weights, name: str, parameter: Tensor) -> Tensor:
    """The complete first tensor of a parameter. Raises UserError when the weights have none, or one of another shape."""
    try:
        tensor = weights.get(name)
    except KeyError:
        raise UserError(f"the weights have no {name}", fix="these are weights of another model, or only a part of it") from None
    if tensor.shape != parameter.shape:
        raise UserError(
            f"{name} is {list(tensor.shape)} in the weights and {list(parameter.shape)} in the model",
            fix="these are weights of another size or family",
        )
    return tensor


@runtime_checkable
class PostLoadTransform(Protocol):
    """A module that turns its first weights into something else, such as quantised ones, as soon as it has them."""

    def weights_loaded(self) -> None:
        """This module's own parameters and buffers have their values, on their device. Called once, under no_grad."""
        ...


@torch.no_grad()
def materialise(model: nn.Module, weights: Weights, device: str) -> nn.Module:
    """The model with every meta parameter replaced by its tensor from `weights`, and everything on `device`.

    For backends that keep the whole model on each rank. Parameters that are shared stay shared; types are the model's. Each
    `PostLoadTransform` is called before the next module gets its weights, so that what it frees never exists all at once.
    """
    made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
    known = set(weights.names())
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            ready = made.get(parameter)
            if ready is None:
                tensor = first_weight(weights, f"{prefix}.{name}" if prefix else name, parameter)
                ready = nn.Parameter(tensor.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
                made[parameter] = ready
            module._parameters[name] = ready
        for name, buffer in list(module._buffers.items()):
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None:
                module._buffers[name] = (weights.get(full) if full in known else buffer).to(device)
        if isinstance(module, PostLoadTransform):
            module.weights_loaded()
    return model
