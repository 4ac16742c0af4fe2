"""T-LoRA (Soboleva et al. 2025): the noisier a sample is, the fewer ranks of its adapter are active.

At the noise level t, from 0 to 1, the first r_min + floor((r - r_min) (1 - t)^exponent) of r ranks are; others add nothing.

Shapes: B samples; (B, ..., rank) or (B, rank, height, width) values between the two matrices of a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti_diffusers.lora.adapter import Lora
from smalti_diffusers.lora.kinds import ADAPTER

if TYPE_CHECKING:
    from smalti_diffusers.pipeline import PipelineFamily


def mask_ranks(model: nn.Module, lora: Lora, family: PipelineFamily) -> None:
    """Let every call of the model, in training and by its pipeline, switch ranks of its adapter off, if the run asks for it."""
    if lora.least is None:
        return
    from peft.tuners.lora.layer import LoraLayer

    masks = RankMasks(lora.least, lora.exponent, noise_level(family))
    model.register_forward_pre_hook(masks.begin, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            module.lora_A[ADAPTER].register_forward_hook(masks.mask)


class RankMasks:
    """What the layers of one model share. `level` gives the noise level of what the model is called with as its timestep.

    All passes over a micro-batch have the same noise levels, so that layers that are computed again for the backward pass get
    the masks that they had.
    """

    def __init__(self, least: int, exponent: float, level: Callable[[Tensor], Tensor]) -> None:
        self._least, self._exponent, self._level = least, exponent, level
        self._share = torch.ones(1)
        """(B,), or (1,) for all samples: the share of the ranks above the least that is active."""

    def begin(self, model: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> None:
        """Before each call of the model."""
        given = inspect.signature(model.forward).bind(*arguments, **keywords).arguments
        level = self._level(_timestep(given).reshape(-1).float())
        self._share = (1 - level).clamp(0, 1) ** self._exponent

    def mask(self, layer: nn.Module, arguments: tuple[object, ...], output: Tensor) -> Tensor:
        """The output of a first matrix, with zeros for the ranks that are not active."""
        images = isinstance(layer, nn.Conv2d)
        rank = output.shape[1] if images else output.shape[-1]
        if len(self._share) not in (1, len(output)):
            raise UserError(
                f"a layer that is adapted has inputs of {len(output)} rows for {len(self._share)} samples, so that its ranks "
                "cannot follow the noise level",
                fix="--lora_targets=NAME,... of the layers of the blocks, or leave --tlora_min_rank out",
            )
        least = min(self._least, rank)
        active = least + torch.floor((rank - least) * self._share)
        mask = (torch.arange(rank, device=output.device) < active[:, None]).to(output.dtype)
        ends = output.ndim - 2
        return output * (mask.view(-1, rank, *(1,) * ends) if images else mask.view(-1, *(1,) * ends, rank))


def noise_level(family: PipelineFamily) -> Callable[[Tensor], Tensor]:
    """From the timestep that the family's model is called with to the noise level, of which it is a linear function."""
    ends: list[float] = []

    def level(timestep: Tensor) -> Tensor:
        if not ends:
            edge = 4 * family.alignment
            noisy, conditioning = torch.zeros(1, *family.latent_shape(edge, edge)), family.example_conditioning(edge, edge)
            pure = (torch.tensor([each]) for each in (0.0, 1000.0))
            ends.extend(float(_timestep(family.inputs(noisy, each, conditioning))) for each in pure)
        return (timestep - ends[0]) / (ends[1] - ends[0])

    return level


def _timestep(inputs: Mapping[str, Any]) -> Tensor:
    """As diffusers' models name it."""
    return torch.as_tensor(next(inputs[name] for name in ("timestep", "timesteps", "t") if name in inputs))
