"""Stable Diffusion XL (Podell et al. 2023): a U-Net on latents, conditioned on two CLIP encoders, original size and crop.

Shapes: B batch, latents (B, C, h, w), L = 77 tokens, D their width (both encoders beside each other), P the pooled caption's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti.models import SizeConditioning
from smalti.parallel import to_device
from smalti_diffusers.families.captions import PooledRow, TokenRows
from smalti_diffusers.families.unet import UNetFamily
from smalti_diffusers.sources.components import Components


class Sdxl(UNetFamily):
    name = "sdxl"
    pipeline = "StableDiffusionXLPipeline"
    published = "stabilityai/stable-diffusion-xl-base-1.0"
    # Its activations leave the range of fp16, and bf16 is too coarse for an autoencoder.
    vae_in_fp32 = True
    adaptable_encoders = ("text_encoder", "text_encoder_2")
    captions = {
        "tokens": TokenRows(width="cross_attention_dim"),
        "pooled": PooledRow(returned=2, width="projection_class_embeddings_input_dim"),
    }

    @classmethod
    def build_adaptable(cls, components: Components) -> nn.Module:
        from smalti_diffusers.families.encoding_unet import EncodingUNetXL

        return cast(nn.Module, EncodingUNetXL.build(components))

    @property
    def _zeros_for_empty(self) -> bool:
        choice = self.options.sdxl_empty_prompt
        return choice == "zeros" or (choice == "auto" and self._zeros_in_the_pipeline)

    @property
    def _zeros_in_the_pipeline(self) -> bool:
        return bool(self.components.settings.get("force_zeros_for_empty_prompt", True))

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        return self._encode([caption or None for caption in captions])

    def encode_negative_prompts(self, prompts: Sequence[str | None]) -> Conditioning:
        """As the pipeline has it: zeros stand only for no negative prompt, and "" is encoded."""
        return self._encode(prompts)

    def _encode(self, prompts: Sequence[str | None]) -> Conditioning:
        """None is the empty prompt, in the form that the options say. Where encoders are trained, the model encodes tokens."""
        if self.encoders:
            return self._tokenised(prompts)
        with torch.no_grad():
            tokens, _, pooled, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                prompt=[prompt or "" for prompt in prompts], device=self.device, do_classifier_free_guidance=False
            )
        if self._zeros_for_empty:
            given = torch.tensor([prompt is not None for prompt in prompts], device=self.device)
            tokens, pooled = tokens * given[:, None, None], pooled * given[:, None]
        return {"tokens": tokens.float(), "pooled": pooled.float()}

    def _tokenised(self, prompts: Sequence[str | None]) -> Conditioning:
        """(B, L) token ids for each encoder, and whether there is a prompt: 0 where the conditioning is zeros."""
        texts = [prompt or "" for prompt in prompts]
        given = torch.tensor([float(prompt is not None or not self._zeros_for_empty) for prompt in prompts])
        return {
            "ids": self.token_ids("tokenizer", texts),
            "ids_2": self.token_ids("tokenizer_2", texts),
            "given": to_device(given, self.device),
        }

    def idle_layers(self) -> tuple[str, ...]:
        """The last layer of the first encoder: tokens are those before it, and the pooled caption is the second's."""
        if not self.encoders:
            return ()
        last = cast(int, self.components.config("text_encoder")["num_hidden_layers"]) - 1
        return (f"text_encoder.text_model.encoder.layers.{last}.",)

    def embedded(self, model: nn.Module, conditioning: Conditioning) -> Conditioning:
        if not self.encoders:
            return conditioning
        tokens, pooled = model(texts=conditioning)
        return {"tokens": tokens.float(), "pooled": pooled.float()}

    def encode_size_conditioning(self, sizes: Sequence[SizeConditioning], width: int, height: int) -> Conditioning:
        """(B, 6): height and width of the original, top and left of the crop, height and width that are trained."""
        rows = [(size.height, size.width, size.top, size.left, height, width) for size in sizes]
        return {"time_ids": to_device(torch.tensor(rows, dtype=torch.float32), self.device).view(len(rows), 6)}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        config = self.model_config
        times = 6 * cast(int, config["addition_time_embed_dim"])
        if self.encoders:
            ids = torch.zeros(1, 77, dtype=torch.long)
            return {"ids": ids, "ids_2": ids.clone(), "given": torch.ones(1), "time_ids": torch.empty(1, 6)}
        return {
            "tokens": torch.empty(1, 77, cast(int, config["cross_attention_dim"])),
            "pooled": torch.empty(1, cast(int, config["projection_class_embeddings_input_dim"]) - times),
            "time_ids": torch.empty(1, 6),
        }

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        called: dict[str, object] = {"sample": noisy, "timestep": timesteps}
        if self.encoders:
            texts = {name: conditioning[name] for name in ("ids", "ids_2", "given")}
            return called | {"texts": texts, "added_cond_kwargs": {"time_ids": conditioning["time_ids"]}}
        return called | {
            "encoder_hidden_states": conditioning["tokens"],
            "added_cond_kwargs": {"text_embeds": conditioning["pooled"], "time_ids": conditioning["time_ids"]},
        }

    def text_settings(self) -> dict[str, object]:
        return {"zeros_for_empty": self._zeros_for_empty}

    def pipeline_changes(self) -> dict[str, object]:
        if self._zeros_for_empty == self._zeros_in_the_pipeline:
            return super().pipeline_changes()
        return {"force_zeros_for_empty_prompt": self._zeros_for_empty}
