"""The memory format of images: convolutions on (B, h, w, C), channels last, which tensor cores need.

Only the inputs of convolutions are converted; their outputs keep the format. Weights stay as they are, and with them shards,
optimizer state and checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smalti.errors import UserError
from smalti.models.family import ModelFamily


def wants_channels_last(chosen: bool | None, family: ModelFamily, device: str) -> bool:
    """Whether a run uses channels last: as chosen, else on CUDA devices for a family whose model is `convolutional`."""
    if chosen is None:
        return family.convolutional and torch.device(device).type == "cuda"
    return chosen


def use_channels_last(model: nn.Module) -> None:
    """Make every two-dimensional convolution of `model`, which may be on the meta device, compute with channels last.

    Raises UserError for a model that has none.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not found:
        raise UserError("the model has no convolutions that could compute with channels last", fix="--no_channels_last")
    for module in found:
        module.register_forward_pre_hook(_to_channels_last)


def _to_channels_last(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """At each convolution again, because norms and reshapes between them change the format; free where it is right already."""
    return (inputs[0].contiguous(memory_format=torch.channels_last),)
