"""PixArt Sigma (Chen et al. 2024) and Alpha (Chen et al. 2023): noise prediction, T5 tokens by cross-attention.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import Split
from smalti.parallel import to_device
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.noiseschedule import check_noise_schedule
from smalti_diffusers.families.transformer import TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components

ALPHA = "PixArtAlphaPipeline"


class PixArt(TransformerFamily):
    name = "pixart"
    pipeline = "PixArtSigmaPipeline"
    other_pipelines = (ALPHA,)
    blocks = ("BasicTransformerBlock",)
    time = "1000t"
    captions = {"tokens": TokenRows(width="caption_channels"), "mask": Mask()}
    # Caption cleaning would need packages, and change prompts.
    encode_arguments = {"do_classifier_free_guidance": False, "clean_caption": False}
    # Without binning, images have the size asked for.
    sample_arguments = {"negative_prompt": None, "clean_caption": False, "use_resolution_binning": False}
    splits = (Split(module="pos_embed", tensor=0, stream="image", dim=1),)  # the text is short
    attention = {"transformer_blocks.*.attn1": ("image",)}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        self.vae_in_fp32 = self.pipeline != ALPHA  # that of Sigma is the one of Stable Diffusion XL
        self.max_length = 120 if self.pipeline == ALPHA else 300
        if config is not None:
            check_noise_schedule(config, components.config("scheduler"), str(components.folder))

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """What Alpha at 1024 pixels is conditioned on: height and width in pixels (B, 2), and height by width (B, 1)."""
        if self.pipeline != ALPHA or self.model_config["sample_size"] != 128:
            return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        height, width = (size * self.vae_scale for size in noisy.shape[-2:])
        size = to_device(torch.tensor([height, width, height / width], dtype=torch.float32), noisy.device)
        batch = len(noisy)
        return {"added_cond_kwargs": {"resolution": size[:2].expand(batch, 2), "aspect_ratio": size[2:].expand(batch, 1)}}

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        """The noise; a model with a learned variance (Nichol and Dhariwal 2021) says that in the other half of its channels.

        No loss is computed on the variance: samplers leave it aside, as diffusers' own pipeline does.
        """
        return prediction[:, : noisy.shape[1]]
