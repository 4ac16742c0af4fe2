"""Putting first weights into a model that was built without any."""

from __future__ import annotations

import torch
from torch import nn

from smalti.models.family import Weights


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
