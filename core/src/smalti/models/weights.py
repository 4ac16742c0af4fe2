"""Building a model without weights, and putting first weights into it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from smalti.checkpoint import DTYPES, StoredTensor, TensorFiles
from smalti.errors import CheckpointError, UserError

AGAIN = "copy or download it again"
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


_dry_run: Literal["", "missing", "all"] = ""


@contextmanager
def dry_run(which: Literal["missing", "all"] = "all") -> Iterator[None]:
    """Within it families are opened without weights: what they load has shapes and no values. For the whole process.

    With "missing" only those are whose weights are not on this machine; others are read and checked, and none are downloaded.
    The caller makes sure that tensors are made without values too, by torch's `FakeTensorMode`.
    """
    global _dry_run
    before, _dry_run = _dry_run, which
    try:
        yield
    finally:
        _dry_run = before


def is_dry_run(*, missing: bool = False) -> bool:
    """Whether weights are not to be read, and need not be there: parts are built from their configuration instead.

    `missing` asks it for weights that are not on this machine.
    """
    return _dry_run == "all" or (missing and _dry_run == "missing")


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
    """`Weights` from all safetensors files of a folder, or from one such file. Tensors are read one at a time, headers once.

    `files` are those of the folder that count; None takes all, which must not repeat a tensor. Raises UserError, which names
    the file, when there is nothing to read or a file is damaged.
    """

    def __init__(self, path: Path, files: Iterable[Path] | None = None) -> None:
        if files is None:
            files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        try:
            self._files = TensorFiles(files)
        except CheckpointError as error:
            raise UserError(error.message, fix=AGAIN) from error
        if not self._files.tensors:
            fix = "name a folder of *.safetensors files; weights in .bin files are pickles and have to be converted first"
            raise UserError(f"there are no safetensors weights at {path}", fix=fix)
        self._path = path

    def names(self) -> Iterator[str]:
        return iter(self._files.tensors)

    def stored(self, name: str) -> StoredTensor:
        """Type and shape of a tensor, from its file's header."""
        return self._files.tensors[name]

    def get(self, name: str) -> Tensor:
        return self.rows(name, 0, None)

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """A range of the first dimension of one tensor; no more is read. None is its end. Raises KeyError as `get` does."""
        stored = self.stored(name)
        shape = stored.shape if stop is None else (stop - start, *stored.shape[1:])
        tensor = torch.empty(shape, dtype=DTYPES[stored.dtype])
        # Not mapped: what was read would stay in memory as long as any tensor of the file does.
        begin = start * math.prod(stored.shape[1:]) * tensor.itemsize
        self._read_into(tensor.view(-1).view(torch.uint8).numpy().data, name, begin)
        return tensor

    def _read_into(self, target: memoryview, name: str, begin: int) -> None:
        try:
            self._files.read_into(target, name, begin)
        except CheckpointError as error:
            raise UserError(f"{error.message}: the file has become shorter", fix=AGAIN) from error

    def digest(self, names: Collection[str] | None = None) -> str:
        """Tells these weights from others: names, types, shapes and a sample of the bytes of every tensor, wherever they lie.

        Cheap for any size. It does not find damage. `names` restricts it to some of the tensors; None takes all.
        """
        seen = hashlib.sha256()
        for name in sorted(self._files.tensors if names is None else names):
            stored = self.stored(name)
            seen.update(f"{name} {stored.dtype} {stored.shape} ".encode())
            for place in (0, stored.size // 2, max(stored.size - _SAMPLE, 0)):
                sample = bytearray(min(_SAMPLE, stored.size - place))
                self._read_into(memoryview(sample), name, place)
                seen.update(sample)
        return seen.hexdigest()

    def __str__(self) -> str:
        return str(self._path)


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


def check_names(model: nn.Module, weights: Weights) -> None:
    """Raises UserError if the weights lack a parameter of the model. Reads no tensor."""
    known = set(weights.names())
    if missing := [name for name, _ in model.named_parameters() if name not in known]:
        some = ", ".join(missing[:3])
        raise UserError(
            f"the weights lack {len(missing)} parameters of the model, such as {some}",
            fix="these are weights of another model, or only a part of it",
        )


@runtime_checkable
class PostLoadTransform(Protocol):
    """A module that turns its first weights into something else, such as quantised ones, as soon as it has them."""

    def weights_loaded(self) -> None:
        """This module's own parameters and buffers have their values, on their device. Called once, under no_grad."""
        ...


@torch.no_grad()
def materialise(model: nn.Module, weights: Weights, device: str) -> nn.Module:
    """The model with every meta parameter replaced by its tensor from `weights`, and everything on `device`.

    For backends that keep the whole model on each rank. Parameters that are shared stay shared; types are the model's; the
    memory is never that of `weights`. Each `PostLoadTransform` is called before the next module gets its weights, so that what
    it frees never exists all at once.
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
                ready = nn.Parameter(tensor.to(device, parameter.dtype, copy=True), requires_grad=parameter.requires_grad)
                made[parameter] = ready
            module._parameters[name] = ready
        for name, buffer in list(module._buffers.items()):
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None:
                module._buffers[name] = (weights.get(full) if full in known else buffer).to(device)
        if isinstance(module, PostLoadTransform):
            module.weights_loaded()
    return model
