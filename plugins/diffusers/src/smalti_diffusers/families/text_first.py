"""The transformer of Qwen-Image 2.1 on a text and one image after it, as it is without images as conditions.

Its own code finds out from values of a mask which tokens are of an image: the host would wait for the device, and there are
no values where FLOPs or memory are counted. Here shapes say it. And it places the images of a batch after the longest text;
here each is where it is without its neighbours. The blocks and all other layers are the model's own.

Shapes: B batch, L text tokens, N image tokens, H heads, P pairs of numbers of a head that are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn


def text_first(model: nn.Module) -> None:
    """Make a `QwenImage21Transformer2DModel` take one image, whose tokens follow those of the text."""
    for block in cast(Any, model).transformer_blocks:
        if not isinstance(block.attn.processor, _Positioned):
            block.attn.set_processor(_Positioned(block.attn.processor))
    cast(Any, model).forward = MethodType(_forward, model)  # a copy of the model gets its own


class _Positioned:
    """Attention with positions for each sample: `rotary_emb` is (B, L + N, 1, P). Otherwise it is that of `own`."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, attn: Any, hidden_states: Tensor, *, rotary_emb: Tensor, **given: object) -> object:
        return self.own(_Rotating(attn, rotary_emb), hidden_states, **given)


class _Rotating:
    """The layers of an attention. Its norms also rotate what they norm, queries or keys (B, L + N, H, 2 P)."""

    def __init__(self, attn: Any, angles: Tensor) -> None:
        self.to_q, self.to_k, self.to_v, self.to_out = attn.to_q, attn.to_k, attn.to_v, attn.to_out
        self.heads, self.inner_dim = attn.heads, attn.inner_dim
        self._norm_q, self._norm_k, self._angles = attn.norm_q, attn.norm_k, angles

    def norm_q(self, states: Tensor) -> Tensor:
        return self._rotated(self._norm_q(states).type_as(states))

    def norm_k(self, states: Tensor) -> Tensor:
        return self._rotated(self._norm_k(states).type_as(states))

    def _rotated(self, states: Tensor) -> Tensor:
        pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self._angles).flatten(3).type_as(states)


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    img_shapes: Sequence[Sequence[tuple[int, int, int]]],
    img_mask: Tensor,
    encoder_hidden_states_mask: Tensor | None = None,
    attention_kwargs: object = None,
    kv_cache: Any = None,
    kv_cache_mode: str | None = None,
    return_dict: bool = True,
) -> object:
    """(B, L + N, C), or (B, N, C) with "cached": keys and values of the text are those of an earlier call with "extract"."""
    image, text = self.img_in(hidden_states), self.txt_in(encoder_hidden_states)
    length, valid = text.shape[1], None
    states = torch.cat([text.to(image.dtype), image], dim=1)
    lengths = torch.full((len(text),), length, device=image.device)
    if encoder_hidden_states_mask is not None:
        lengths = encoder_hidden_states_mask.bool().sum(dim=1)
        valid = torch.cat([encoder_hidden_states_mask.bool(), image.new_ones(image.shape[:2], dtype=torch.bool)], dim=1)
    rotary = _rotations(self.pos_embed, length, lengths, *img_shapes[0][-1][1:])
    time, target = timestep.to(image.dtype), None
    if self.config.causal_condition:  # a row more, of the time of the text
        time = torch.cat([time, time.new_zeros(1)])
        target = torch.arange(states.shape[1], device=image.device) >= length
    embedded = self.time_text_embed(time, image)
    modulation = self.modulation(embedded)
    mask, segments, written = None, [(0, length, True)], None
    if kv_cache_mode == "cached":
        states, rotary = states[:, length:], rotary[:, length:]
        target = target[length:] if target is not None else None
        mask, valid = valid[:, None, None] if valid is not None else None, None
        segments = cast(Any, None)
    elif kv_cache_mode == "extract":
        written = slice(0, length)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for number, block in enumerate(self.transformer_blocks):
        layer = kv_cache.get_layer(number) if kv_cache is not None else None
        given = (states, modulation, rotary, mask, target, layer, kv_cache_mode, written, segments, valid)
        states = self._gradient_checkpointing_func(block, *given) if recompute else block(*given)
    output = self.proj_out(self.norm_out(states, embedded, target))
    if not return_dict:
        return (output,)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput  # not where launchers only ask for the family

    return Transformer2DModelOutput(sample=output)


def _rotations(embedding: Any, length: int, lengths: Tensor, height: int, width: int) -> Tensor:
    """(B, L + N, 1, P) complex: a text token has its number on all three axes, the image is centred on zero at the frame L.

    `lengths` (B,) are those of the texts without padding.
    """
    device = lengths.device
    embedding.freqs = [each.to(device) for each in embedding.freqs]  # no parameters, which nobody moves
    rows = torch.arange(height, device=device).repeat_interleave(width, output_size=height * width) - (height - height // 2)
    columns = torch.arange(width, device=device).repeat(height) - (width - width // 2)
    text = torch.arange(length, device=device).expand(len(lengths), -1)
    places = (lengths[:, None], rows, columns)
    axes = zip(embedding.freqs, places, strict=True)
    every = [angles[torch.cat([text, place.expand(len(lengths), len(rows))], dim=1)] for angles, place in axes]
    return torch.cat(every, dim=-1).unsqueeze(2)
