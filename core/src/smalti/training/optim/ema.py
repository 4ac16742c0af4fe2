"""The exponential moving average of the weights, kept in fp32 beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config import Config, TrainingOptions
from smalti.parallel import Parallel


class Ema:
    """Shadows of a rank's share of the weights that train (`Parallel.masters`); the same code for tensors and DTensors.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that the average forgets the first weights quickly. Kept in
    fp32 because in bf16 an update smaller than 1/256 of the weight is lost to rounding. `device` is where the shadows are, None
    beside the parameters.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, device: str | None = None) -> None:
        self.decay = decay
        self._live = dict(parameters)
        self.shadows = {
            name: parameter.detach().to(device or parameter.device, torch.float32, copy=True)
            for name, parameter in self._live.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the shadows towards the weights after optimizer step `step` (counted from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        shadows = [_local(shadow) for shadow in self.shadows.values()]
        live = [_local(parameter.detach()) for parameter in self._live.values()]
        if any(parameter.dtype != torch.float32 or parameter.device != shadows[0].device for parameter in live):
            live = [parameter.to(shadows[0].device, torch.float32) for parameter in live]
        torch._foreach_lerp_(shadows, live, 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are: for a run that resumes from a checkpoint without an average."""
        for name, parameter in self._live.items():
            _local(self.shadows[name]).copy_(_local(parameter))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """The model computes with the averaged weights inside this block; afterwards it has its own again, bit for bit."""
        kept = {name: _local(parameter).detach().clone() for name, parameter in self._live.items()}
        try:
            self._put(self.shadows)
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            _local(parameter).copy_(_local(values[name]))


def build_ema(config: Config, parallel: Parallel, model: nn.Module) -> Ema | None:
    options = config[TrainingOptions]
    if not options.use_ema:
        return None
    return Ema(parallel.masters(model), options.ema_decay, "cpu" if options.ema_device == "cpu" else None)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, which shares memory with the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
