"""Giving a model for ZeRO 3 its first weights, tensor by tensor: a rank holds its parts and one whole tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.runtime.zero.partition_parameters import Init, register_external_parameter
from torch import nn

from smalti.models import Weights, first_weight


@torch.no_grad()
def partition(model: nn.Module, weights: Weights, document: Mapping[str, object], device: str) -> nn.Module:
    """The model, whose parameters are on the meta device, with every parameter sharded over the ranks; buffers on `device`.

    When a module with a true attribute `reads_parts` computes, the parameters of its parts are there, too. `document` is
    DeepSpeed's configuration. Every rank reads each tensor and keeps its part of it. *Collective*.
    """
    init = Init(config_dict_or_path=dict(document))
    made: dict[nn.Parameter, nn.Parameter] = {}  # what is shared stays shared
    known = set(weights.names())
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                tensor = first_weight(weights, path + name, parameter)
                dtype = init.dtype if parameter.is_floating_point() else parameter.dtype  # integers are a weight in 8 bits
                made[parameter] = nn.Parameter(tensor.to(device, dtype), requires_grad=parameter.requires_grad)
                init._convert_to_deepspeed_param(made[parameter])
                made[parameter].partition()  # type: ignore[attr-defined]
            module._parameters[name] = made[parameter]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = (weights.get(path + name) if path + name in known else buffer).to(device)
    for module in model.modules():
        if getattr(module, "reads_parts", False):  # DeepSpeed would gather only what the module itself holds
            for parameter in module.parameters():
                register_external_parameter(module, parameter)
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    return model
