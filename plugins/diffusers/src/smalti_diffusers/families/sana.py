"""Sana (Xie et al. 2024): rectified flow with linear attention on latents 32 times smaller than the image, Gemma as encoder.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from typing import cast

from torch import Tensor, nn

from smalti_diffusers.families.gemma import GemmaFamily
from smalti_diffusers.sources.components import class_of


class Sana(GemmaFamily):
    name = "sana"
    pipeline = "SanaPipeline"
    blocks = ("SanaTransformerBlock",)
    patch = 1
    max_length = 300
    # Without binning, images have the size asked for.
    sample_arguments = {"negative_prompt": None, "use_resolution_binning": False}

    def build_base(self) -> nn.Module:
        model = super().build_base()
        model.register_forward_hook(_in_own_memory)
        return model

    @cached_property
    def instruction(self) -> Mapping[str, object]:
        """What the pipeline's call has as default."""
        name = "complex_human_instruction"
        return {name: signature(class_of("diffusers", self.pipeline).__call__).parameters[name].default}

    def text_settings(self) -> dict[str, object]:
        return {**super().text_settings(), "instruction": next(iter(self.instruction.values()))}

    def model_time(self, timesteps: Tensor) -> Tensor:
        return timesteps * cast(float, self.model_config.get("timestep_scale", 1.0))


def _in_own_memory(model: nn.Module, inputs: object, answer: object) -> object:
    """After the forward pass: its answer, which is a view, copied. FSDP warns of views, which must not be changed in place."""
    return (cast(Tensor, answer[0]).clone(), *answer[1:]) if isinstance(answer, tuple) else answer
