"""Building a model without weights, and putting first weights into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smalti.models.family import Weights


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
    """`Weights` as a model's own constructor draws them under a seed; the model is built when the first is asked for."""

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


@torch.no_grad()
def materialise(model: nn.Module, weights: Weights, device: str) -> nn.Module:
    """The model with every meta parameter replaced by its tensor from `weights`, and everything on `device`.

    For backends that keep the whole model on each rank. Parameters that are shared stay shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    known = set(weights.names())
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                tensor = weights.get(f"{prefix}.{name}" if prefix else name)
                made[parameter] = nn.Parameter(tensor.to(device), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]
        for name, buffer in list(module._buffers.items()):
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None:
                module._buffers[name] = (weights.get(full) if full in known else buffer).to(device)
    return model
