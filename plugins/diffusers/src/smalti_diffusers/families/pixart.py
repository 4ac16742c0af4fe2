"""PixArt Sigma (Chen et al. 2024) and Alpha (Chen et al. 2023): noise prediction, T5 tokens by cross-attention.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split
from smalti.parallel import to_device
from smalti_diffusers.families.noiseschedule import check_noise_schedule
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import Components

ALPHA = "PixArtAlphaPipeline"


class PixArt(PipelineFamily):
    name = "pixart"
    blocks = ("BasicTransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        self.pipeline = ALPHA if components.pipeline == ALPHA else "PixArtSigmaPipeline"
        self.vae_in_fp32 = self.pipeline != ALPHA  # that of Sigma is the one of Stable Diffusion XL
        super().__init__(components, options, config)
        if config is not None:
            check_noise_schedule(config, components.config("scheduler"), str(components.folder))

    @property
    def text_length(self) -> int:
        return self.options.tokenizer_max_length or (120 if self.pipeline == ALPHA else 300)

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        with torch.no_grad():
            tokens, mask, _, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                list(captions),
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=self.text_length,
                clean_caption=False,
            )
        return {"tokens": tokens, "mask": mask}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["caption_channels"])
        length = self.text_length
        return {"tokens": torch.empty(1, length, width_of_text), "mask": torch.ones(1, length, dtype=torch.int64)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {
            "hidden_states": noisy,
            "timestep": timesteps,
            "encoder_hidden_states": conditioning["tokens"],
            "encoder_attention_mask": conditioning["mask"],
            "added_cond_kwargs": self._size(noisy),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        """The noise; a model with a learned variance (Nichol and Dhariwal 2021) says that in the other half of its channels.

        No loss is computed on the variance: samplers leave it aside, as diffusers' own pipeline does.
        """
        return prediction[:, : noisy.shape[1]]

    def context_plan(self, model: nn.Module) -> ContextPlan:
        """The text is short and is not split."""
        return ContextPlan(
            heads=cast(int, self.components.config(self.part)["num_attention_heads"]),
            splits=(Split(module="pos_embed", tensor=0, stream="image", dim=1),),
            attention=(Attention(module="transformer_blocks.*.attn1", streams=("image",)),),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {
            "negative_prompt": None,
            "prompt_embeds": conditioning["tokens"],
            "prompt_attention_mask": conditioning["mask"],
            "negative_prompt_embeds": unconditional["tokens"],
            "negative_prompt_attention_mask": unconditional["mask"],
        }

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        # Without binning, images have the size asked for. Caption cleaning would need packages, and change prompts.
        return {"max_sequence_length": self.text_length, "clean_caption": False, "use_resolution_binning": False}

    def _size(self, noisy: Tensor) -> dict[str, Tensor | None]:
        """Extra conditioning of Alpha at 1024 pixels: height and width in pixels (B, 2), and height by width (B, 1)."""
        if self.pipeline != ALPHA or self.components.config(self.part)["sample_size"] != 128:
            return {"resolution": None, "aspect_ratio": None}
        height, width = (size * self.vae_scale for size in noisy.shape[-2:])
        size = to_device(torch.tensor([height, width, height / width], dtype=torch.float32), noisy.device)
        return {"resolution": size[:2].expand(len(noisy), 2), "aspect_ratio": size[2:].expand(len(noisy), 1)}


def family(config: Config) -> PixArt:
    return cast(PixArt, create(PixArt, config))
