"""Z-Image (Cai et al. 2025): rectified flow from noise at 0 to the image at 1, tokens of Qwen3 and image in one sequence.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.padding import unpadded
from smalti_diffusers.families.tokens import FRAMES
from smalti_diffusers.families.transformer import TransformerFamily


class ZImage(TransformerFamily):
    name = "z_image"
    pipeline = "ZImagePipeline"
    blocks = ("ZImageTransformerBlock",)
    tokens = FRAMES
    patch = 2
    time = "(1000-1000t)/1000"
    sign = -1
    gives_sigmas = True
    captions = {
        "tokens": TokenRows(model="cap_feats", width="cap_feat_dim"),
        "mask": Mask(returned=None, dtype=torch.bool),
    }
    max_length = 512  # with the tokens of the chat around a prompt
    ragged = True
    host_conditioning = ("mask",)
    encode_arguments = {"do_classifier_free_guidance": False}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """Captions of their own lengths one by one."""
        return {"x": self.tokens.pack(noisy), "t": self.model_time(timesteps), "cap_feats": unpadded(conditioning)}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {"prompt_embeds": unpadded(conditioning), "negative_prompt_embeds": unpadded(unconditional)}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """The pipeline counts guidance from 0, which is none; elsewhere, and for smalti, none is 1."""
        given = super().sampling(request) | {"guidance_scale": max(0.0, request.guidance - 1)}
        if self.options.validation_noise_scheduler is not None:  # others than its own do not take the pipeline's list
            given["sigmas"] = numpy.linspace(1.0, 1 / request.steps, request.steps)
        return given
