"""Z-Image (Cai et al. 2025): rectified flow from noise at 0 to the image at 1, tokens of Qwen3 and image in one sequence.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.padding import lengths
from smalti_diffusers.pipeline import PipelineFamily, create


class ZImage(PipelineFamily):
    name = "z_image"
    pipeline = "ZImagePipeline"
    blocks = ("ZImageTransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    gives_sigmas = True
    patch = 2
    host_conditioning = ("mask",)

    @property
    def text_length(self) -> int:
        """With the tokens of the chat around a prompt."""
        return self.options.tokenizer_max_length or 512

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Padded to one length with zeros, so that rows can be cached; `inputs` takes the padding off."""
        with torch.no_grad():
            rows, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                list(captions), device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.text_length
            )
        masks = [torch.ones(len(row), dtype=torch.bool, device=row.device) for row in rows]
        return {
            "tokens": torch.stack([pad(row, (0, 0, 0, self.text_length - len(row))) for row in rows]),
            "mask": torch.stack([pad(mask, (0, self.text_length - len(mask))) for mask in masks]),
        }

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["cap_feat_dim"])
        length = self.text_length
        return {"tokens": torch.empty(1, length, width_of_text), "mask": torch.ones(1, length, dtype=torch.bool)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """The model takes images, which are videos of one frame, and captions of their own lengths one by one."""
        return {"x": list(noisy.unsqueeze(2)), "t": (1000 - timesteps) / 1000, "cap_feats": _rows(conditioning)}

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        """The model predicts the direction of the image, as a list of videos; velocity points to the noise."""
        return -torch.stack(list(prediction)).squeeze(2)

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {"prompt_embeds": _rows(conditioning), "negative_prompt_embeds": _rows(unconditional)}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """The pipeline counts guidance from 0, which is none; elsewhere, and for smalti, none is 1."""
        given: dict[str, object] = {"guidance_scale": max(0.0, request.guidance - 1), "max_sequence_length": self.text_length}
        if self.options.validation_noise_scheduler is not None:  # others than its own do not take the pipeline's list
            given["sigmas"] = numpy.linspace(1.0, 1 / request.steps, request.steps)
        return given


def _rows(conditioning: Conditioning) -> list[Tensor]:
    """Tokens without padding."""
    return [row[:length] for row, length in zip(conditioning["tokens"], lengths(conditioning["mask"]), strict=True)]


def family(config: Config) -> ZImage:
    return cast(ZImage, create(ZImage, config))
