"""A U-Net of SDXL that holds its two text encoders, which are trained with it. Importing this module imports diffusers.

Shapes: B captions, L = 77 tokens, D width of both encoders beside each other, P of the pooled caption.
"""

from __future__ import annotations

from typing import Any, cast

from diffusers import UNet2DConditionModel
from torch import Tensor, cat, nn, zeros_like

from smalti.diffusion import Conditioning
from smalti_diffusers.sources.components import Components


class EncodingUNet(UNet2DConditionModel):
    """Called with `texts`, it encodes them itself; called with embeddings, it is the U-Net as ever.

    The encoders are part of this module so that their layers are spread, recomputed and saved as the others are, and so that
    whatever surrounds a call of the model, such as the gathering of shards, surrounds theirs.
    """

    text_encoder: nn.Module
    text_encoder_2: nn.Module
    encoders_learn = True
    """Without, the gradients of the encoders are zeros."""

    @classmethod
    def build(cls, components: Components) -> EncodingUNet:
        """From the configurations of a pipeline, with the weights that constructors make."""
        made = cast(EncodingUNet, cast(Any, cls).from_config(components.config("unet")))
        # A configuration may name another type, which adapters would be made in.
        made.text_encoder = _named_as_in_files(components.build("text_encoder").float())
        made.text_encoder_2 = _named_as_in_files(components.build("text_encoder_2").float())
        return made

    def encode(self, texts: Conditioning) -> tuple[Tensor, Tensor]:
        """(B, L, D) and (B, P) of (B, L) token ids of each encoder, as the pipeline's `encode_prompt` has them.

        Of `given` (B,) 0 makes a row of zeros.
        """
        first = self.text_encoder(texts["ids"], output_hidden_states=True)
        second = self.text_encoder_2(texts["ids_2"], output_hidden_states=True)
        tokens = cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        given = texts["given"].to(tokens.dtype)
        encoded = tokens * given[:, None, None], second[0] * given[:, None]
        for each in () if self.encoders_learn else encoded:
            if each.requires_grad:
                each.register_hook(zeros_like)
        return encoded

    def forward(self, sample: Tensor | None = None, timestep: Tensor | None = None, *arguments: Any, **named: Any) -> Any:
        """The prediction; without `sample`, what `encode` makes of `texts`."""
        texts, predict = named.pop("texts", None), cast(Any, super()).forward
        if texts is None:
            return predict(sample, timestep, *arguments, **named)
        tokens, pooled = self.encode(texts)
        if sample is None:
            return tokens, pooled
        added = {**named.pop("added_cond_kwargs"), "text_embeds": pooled}
        return predict(sample, timestep, tokens, *arguments, added_cond_kwargs=added, **named)


class _Flat(nn.Module):
    """Gives an encoder the `text_model` before the names of its layers that its class lacks in newer transformers."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.text_model = encoder

    def forward(self, ids: Tensor, **settings: bool) -> Any:
        return self.text_model(ids, **settings)


def _named_as_in_files(encoder: nn.Module) -> nn.Module:
    named = encoder if hasattr(encoder, "text_model") else _Flat(encoder)
    for module in named.modules():
        if type(module).__name__ == "CLIPTextEmbeddings":
            cast(Any, module).reads_parts = True  # it reads the length of its table of positions
    return named
