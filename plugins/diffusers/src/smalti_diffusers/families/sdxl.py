"""Stable Diffusion XL (Podell et al. 2023): a U-Net on latents, conditioned on two CLIP encoders, original size and crop.

Shapes: B batch, latents (B, C, h, w), L = 77 tokens, D their width (both encoders beside each other), P the pooled caption's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config, UserError
from smalti.config import ObjectiveOptions
from smalti.diffusion import Conditioning
from smalti.models import SizeConditioning
from smalti.parallel import to_device
from smalti_diffusers.families.noiseschedule import check_noise_schedule
from smalti_diffusers.families.pooled import pooled_prompts
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import Components


class Sdxl(PipelineFamily):
    name = "sdxl"
    pipeline = "StableDiffusionXLPipeline"
    part = "unet"
    # Stages of the U-Net hold up to half of it, and their Transformer2DModels up to a seventh. Of these two, which are all
    # of the model but 2 % of it, the largest is 2 % too; the 70 transformer blocks are 10 to 35 million parameters each.
    blocks = ("BasicTransformerBlock", "ResnetBlock2D")
    # Sizes were multiples of 64 pixels in its own training; the U-Net itself needs no more than its two halvings.
    patch = 8
    # Its activations leave the range of fp16, and bf16 is too coarse for an autoencoder.
    vae_in_fp32 = True
    predictions = ("epsilon", "v_prediction")
    convolutional = True
    rescales_guidance = True
    adaptable_encoders = ("text_encoder", "text_encoder_2")

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        if components.pipeline != self.pipeline:  # the refiner and inpainting models are called otherwise
            raise UserError(
                f"{components.folder} is a {components.pipeline}, not a {self.pipeline}",
                fix="name a text-to-image pipeline of SDXL, such as stabilityai/stable-diffusion-xl-base-1.0",
            )
        super().__init__(components, options, config)
        if self.prediction not in ("epsilon", "v_prediction"):
            raise UserError(
                f"sdxl cannot be trained with the prediction '{self.prediction}'",
                fix="use a pipeline with, or --prediction_type=, epsilon or v_prediction",
            )
        self.zero_snr = False
        if config is not None:
            check_noise_schedule(config, components.config("scheduler"), str(components.folder))
            self.zero_snr = config[ObjectiveOptions].rescale_betas_zero_snr

    @classmethod
    def build_adaptable(cls, components: Components) -> nn.Module:
        from smalti_diffusers.families.encoding_unet import EncodingUNet

        return cast(nn.Module, EncodingUNet.build(components))

    def build_base(self) -> nn.Module:
        model = self.build_adaptable(self.components) if self.encoders else super().build_base()
        # Blocks are taken in the order in which the model holds them; its own has the middle after the way up.
        up = model.up_blocks
        del model.up_blocks
        model.up_blocks = up
        return model

    def image_tokens(self, width: int, height: int) -> int:
        """Of the largest stage with attention: one for each position, after the halvings before it."""
        stages = cast(list[str], self.components.config(self.part)["down_block_types"])
        edge = self.vae_scale << next(number for number, kind in enumerate(stages) if "Attn" in kind)
        return (width // edge) * (height // edge)

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

        def ids(name: str) -> Tensor:
            tokeniser = getattr(self.encoder, name)
            texts = [prompt or "" for prompt in prompts]
            length = tokeniser.model_max_length
            found = tokeniser(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            return to_device(found.input_ids, self.device)

        given = torch.tensor([float(prompt is not None or not self._zeros_for_empty) for prompt in prompts])
        return {"ids": ids("tokenizer"), "ids_2": ids("tokenizer_2"), "given": to_device(given, self.device)}

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
        config = self.components.config(self.part)
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

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return pooled_prompts(conditioning, unconditional)

    def pipeline_changes(self) -> dict[str, object]:
        if self._zeros_for_empty == self._zeros_in_the_pipeline:
            return super().pipeline_changes()
        return {"force_zeros_for_empty_prompt": self._zeros_for_empty}

    def scheduler_changes(self) -> dict[str, object]:
        if not self.zero_snr:
            return {"prediction_type": self.prediction}
        # Only a schedule that begins in the last step begins in pure noise (Lin et al. 2023, section 3.3).
        return {"prediction_type": self.prediction, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def family(config: Config) -> Sdxl:
    return cast(Sdxl, create(Sdxl, config))
