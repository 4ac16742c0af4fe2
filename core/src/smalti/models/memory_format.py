"""The layout of pictures in memory: convolutions on (B, h, w, C), channels last, as tensor cores want it.

Only the inputs of convolutions change; they compute in that layout and give it on. Weights stay as they are, and with them
shards, moments and checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smalti.errors import UserError
from smalti.models.family import ModelFamily


def wants_channels_last(chosen: bool | None, family: ModelFamily, device: str) -> bool:
    """Whether a run puts channels last: as chosen, else for a family that says it is convolutional, on CUDA devices."""
    if chosen is None:
        return bool(getattr(family, "convolutional", False)) and torch.device(device).type == "cuda"
    return chosen


def use_channels_last(model: nn.Module) -> None:
    """Make every two-dimensional convolution of `model`, which may be on the meta device, compute with channels last.

    Raises UserError for a model that has none.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not found:
        raise UserError("the model has no convolutions that could compute with channels last", fix="--no_channels_last")
    for module in found:
        module.register_forward_pre_hook(_turned)


def _turned(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """At each convolution anew, because norms and reshapes on the way give other layouts; costs nothing where it fits."""
    return (inputs[0].contiguous(memory_format=torch.channels_last),)
