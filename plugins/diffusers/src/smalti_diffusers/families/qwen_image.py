"""Qwen-Image (Wu et al. 2025): rectified flow on packed latents, tokens of Qwen2.5-VL beside them; an autoencoder for video.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti.models import SampleRequest, Split
from smalti_diffusers.families.autoencoders import VideoAutoencoder
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.padding import as_long_as_the_longest
from smalti_diffusers.families.tokens import PACKED
from smalti_diffusers.families.transformer import TransformerFamily, joint_attention

_TEXT_MASK, _MORE = "encoder_hidden_states_mask", "joint_attention_kwargs"
_ARGUMENTS = ("hidden_states", "encoder_hidden_states", _TEXT_MASK, "temb", "image_rotary_emb", _MORE, "modulate_index")
"""Of a block, in order."""
_MULTIPLE = 64
"""Texts that are trained have multiples of this many tokens, so that few lengths occur, whatever the data."""


class QwenImage(TransformerFamily):
    name = "qwen_image"
    pipeline = "QwenImagePipeline"
    blocks = ("QwenImageTransformerBlock",)
    autoencoder = VideoAutoencoder
    tokens = PACKED
    patch = 2
    guided = True
    gives_sigmas = True
    captions = {
        "tokens": TokenRows(width="joint_attention_dim"),
        "mask": Mask(model=None, pipeline="prompt_embeds_mask"),
    }
    max_length = 512  # without the tokens of the template, which are taken off
    ragged = True
    host_conditioning = ("mask",)
    # The negative prompt of the published examples: what is guided away from, and so what a dropped caption is.
    empty_prompt = " "
    splits = (
        Split(module="transformer_blocks.0", tensor="hidden_states", stream="image", dim=1),
        Split(module="transformer_blocks.0", tensor="encoder_hidden_states", stream="text", dim=1),
        Split(module="transformer_blocks.*", tensor=_TEXT_MASK, stream="text", dim=1),
        Split(module="pos_embed", tensor=0, stream="image", dim=0),
        Split(module="pos_embed", tensor=1, stream="text", dim=0),
    )
    attention = joint_attention("transformer_blocks")

    def build_base(self) -> nn.Module:
        model = super().build_base()
        blocks = cast(nn.ModuleList, model.transformer_blocks)
        blocks[-1].register_forward_hook(_text_counts_for_nothing)
        mask_aside(model)
        return model

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """The mask is where `mask_aside` takes it from."""
        tokens, mask = as_long_as_the_longest(conditioning["tokens"], conditioning["mask"], multiple=_MULTIPLE)
        height, width = noisy.shape[-2:]
        return super().inputs(noisy, timesteps, {"tokens": tokens}) | {
            "attention_kwargs": None if mask is None else {_TEXT_MASK: mask.bool()},
            "img_shapes": [[(1, height // 2, width // 2)]] * len(noisy),
        }

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """Guidance by the empty caption, which the pipeline sees only with a mask; it drops one that masks nothing."""
        tokens, mask = as_long_as_the_longest(conditioning["tokens"], conditioning["mask"])
        empty, of_empty = as_long_as_the_longest(unconditional["tokens"], unconditional["mask"])
        if of_empty is None:
            of_empty = torch.ones(empty.shape[:2], dtype=torch.int64, device=empty.device)
        given: dict[str, object] = {"prompt_embeds": tokens, "prompt_embeds_mask": mask}
        return given | {"negative_prompt_embeds": empty, "negative_prompt_embeds_mask": of_empty}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """What the pipeline calls guidance_scale is for models that there are none of."""
        return {**super().sampling(request), "guidance_scale": None, "true_cfg_scale": request.guidance}


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
