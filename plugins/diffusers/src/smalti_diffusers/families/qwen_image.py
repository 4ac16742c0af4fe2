"""Qwen-Image (Wu et al. 2025): rectified flow on packed latents, tokens of Qwen2.5-VL beside them; an autoencoder for video.

Shapes: B batch, latents (B, C, h, w), N = (h / 2) (w / 2) packed tokens of 4 C numbers, L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split
from smalti_diffusers.families.flux import pack, unpack
from smalti_diffusers.families.padding import beside, lengths
from smalti_diffusers.pipeline import PipelineFamily, create

EMPTY = " "
"""The negative prompt of the published examples: what is guided away from, and so what a dropped caption is."""

_BLOCKS = "transformer_blocks"
_TEXT_MASK, _MORE = "encoder_hidden_states_mask", "joint_attention_kwargs"
_ARGUMENTS = ("hidden_states", "encoder_hidden_states", _TEXT_MASK, "temb", "image_rotary_emb", _MORE, "modulate_index")
"""Of a block, in order."""
_MULTIPLE = 64
"""Texts that are trained have multiples of this many tokens, so that few lengths occur, whatever the data."""


class QwenImage(PipelineFamily):
    name = "qwen_image"
    pipeline = "QwenImagePipeline"
    blocks = ("QwenImageTransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    gives_sigmas = True
    patch = 2
    host_conditioning = ("mask",)

    def build_base(self) -> nn.Module:
        model = super().build_base()
        blocks = cast(nn.ModuleList, model.transformer_blocks)
        blocks[-1].register_forward_hook(_text_counts_for_nothing)
        mask_aside(model)
        return model

    # --- latents ----------------------------------------------------------------------------------------------------

    @property
    def vae_scale(self) -> int:
        return int(2 ** len(cast(list[bool], self.components.config("vae")["temperal_downsample"])))

    @property
    def latent_channels(self) -> int:
        return cast(int, self.components.config("vae")["z_dim"])

    def raw_latents(self, pixels: Tensor) -> Tensor:
        """An image is a video of one frame."""
        vae = self.vae
        video = pixels.to(next(vae.parameters()).dtype).unsqueeze(2)
        latents: Tensor = vae.encode(video).latent_dist.mode().squeeze(2)  # type: ignore[operator]
        return latents

    def normalise_latents(self, raw: Tensor) -> Tensor:
        """Normalised to zero mean and unit variance."""
        mean, width = self._statistics(raw.device)
        return (raw.float() - mean) / width

    def decode_latents(self, latents: Tensor) -> Tensor:
        mean, width = self._statistics(latents.device)
        vae = self.vae
        video = (latents * width + mean).to(next(vae.parameters()).dtype).unsqueeze(2)
        pixels: Tensor = vae.decode(video, return_dict=False)[0]  # type: ignore[operator]
        return pixels.squeeze(2).float().clamp(-1, 1)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the autoencoder's latents, both (C, 1, 1)."""
        config = self.components.config("vae")
        mean, width = (tuple(cast(list[float], config[name])) for name in ("latents_mean", "latents_std"))
        return _channels(mean, device), _channels(width, device)

    # --- texts ------------------------------------------------------------------------------------------------------

    @property
    def text_length(self) -> int:
        """Without the tokens of the template, which are taken off."""
        return self.options.tokenizer_max_length or 512

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Padded to one length with zeros, so that rows can be cached; `inputs` takes the padding off."""
        with torch.no_grad():
            tokens, mask = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                [caption or EMPTY for caption in captions], device=self.device, max_sequence_length=self.text_length
            )
        mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device) if mask is None else mask
        missing = self.text_length - tokens.shape[1]
        return {
            "tokens": nn.functional.pad(tokens, (0, 0, 0, missing)),
            "mask": nn.functional.pad(mask, (0, missing)),
        }

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["joint_attention_dim"])
        length = self.text_length
        return {"tokens": torch.empty(1, length, width_of_text), "mask": torch.ones(1, length, dtype=torch.int64)}

    # --- the model --------------------------------------------------------------------------------------------------

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        tokens, mask = _as_long_as_the_longest(conditioning["tokens"], conditioning["mask"], multiple=_MULTIPLE)
        height, width = noisy.shape[-2:]
        return {
            "hidden_states": pack(noisy),
            "timestep": timesteps / 1000,
            "guidance": None,
            "encoder_hidden_states": tokens,
            "attention_kwargs": None if mask is None else {_TEXT_MASK: mask.bool()},
            "img_shapes": [[(1, height // 2, width // 2)]] * len(noisy),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        return unpack(prediction, *noisy.shape[-2:])

    def context_plan(self, model: nn.Module) -> ContextPlan:
        return ContextPlan(
            heads=cast(int, self.components.config(self.part)["num_attention_heads"]),
            splits=(
                Split(module=f"{_BLOCKS}.0", tensor="hidden_states", stream="image", dim=1),
                Split(module=f"{_BLOCKS}.0", tensor="encoder_hidden_states", stream="text", dim=1),
                Split(module=f"{_BLOCKS}.*", tensor=_TEXT_MASK, stream="text", dim=1),
                Split(module="pos_embed", tensor=0, stream="image", dim=0),
                Split(module="pos_embed", tensor=1, stream="text", dim=0),
            ),
            attention=(Attention(module=f"{_BLOCKS}.*.attn", streams=("text", "image")),),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """Guidance by the empty caption, which the pipeline sees only with a mask; it drops one that masks nothing."""
        tokens, mask = _as_long_as_the_longest(conditioning["tokens"], conditioning["mask"])
        empty, of_empty = _as_long_as_the_longest(unconditional["tokens"], unconditional["mask"])
        return {
            "prompt_embeds": tokens,
            "prompt_embeds_mask": mask,
            "negative_prompt_embeds": empty,
            "negative_prompt_embeds_mask": torch.ones(empty.shape[:2], dtype=torch.int64, device=empty.device)
            if of_empty is None
            else of_empty,
        }

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """What the pipeline calls guidance_scale is for models that there are none of."""
        return {"guidance_scale": None, "true_cfg_scale": request.guidance, "max_sequence_length": self.text_length}


def _as_long_as_the_longest(tokens: Tensor, mask: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Without what is padding in every row, but for what the number of tokens needs to be a `multiple`; and the mask of them.

    With a multiple of 1 as the pipeline returns them. No mask where it would be all ones.
    """
    known = lengths(mask)
    longest = min(-(-max(known) // multiple) * multiple, tokens.shape[1])
    return tokens[:, :longest], None if min(known) == longest else beside(mask, tokens.device)[:, :longest]


def mask_aside(model: nn.Module) -> None:
    """Make a transformer take the mask of the text from where `QwenImage.inputs` puts it."""
    for block in cast(nn.ModuleList, model.transformer_blocks):
        block.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(block: nn.Module, inputs: tuple[object, ...], given: dict[str, object]) -> tuple[object, dict[str, object]]:
    """Before a block: the mask of the text is taken from where `inputs` has put it.

    In its own argument, the model would count tokens on the device first, for which the host would wait.
    """
    named = dict(zip(_ARGUMENTS, inputs, strict=False)) | given
    more = cast(dict[str, object], named.get(_MORE) or {})
    if _TEXT_MASK not in more:
        return inputs, given
    named[_TEXT_MASK] = more[_TEXT_MASK]
    named[_MORE] = {name: value for name, value in more.items() if name != _TEXT_MASK}
    return (), named


def _text_counts_for_nothing(block: nn.Module, inputs: object, answer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """After the last block: its text, which nobody reads, is added to the image zero times.

    What it is made with has a gradient of zeros then; replicas wait for a gradient of every parameter.
    """
    text, image = answer
    return text, image + 0 * text.mean()


@lru_cache(maxsize=4)
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1). It stays on the device, as every step wants it."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


def family(config: Config) -> QwenImage:
    return cast(QwenImage, create(QwenImage, config))
