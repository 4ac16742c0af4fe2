"""U-Nets of Stable Diffusion that hold their text encoders, which are trained with them. Importing this imports diffusers.

Shapes: B captions, L = 77 tokens, D their width, of SDXL that of both encoders beside each other, P of the pooled caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

from diffusers import UNet2DConditionModel
from torch import Tensor, cat, is_grad_enabled, nn, zeros_like

from smalti.diffusion import Conditioning
from smalti_diffusers.lora.kept_texts import KeptTexts
from smalti_diffusers.sources.components import Components


class EncodingUNet(UNet2DConditionModel):
    """Called with `texts`, it encodes them itself; called with embeddings, it is the U-Net as ever. It has one encoder.

    The encoders are part of this module so that their layers are spread, recomputed and saved as the others are, and so that
    whatever surrounds a call of the model, such as the gathering of shards, surrounds theirs.
    """

    held: ClassVar[Sequence[str]] = ("text_encoder",)
    text_encoder: nn.Module
    training: bool
    clip_skip = 0
    """Last layers of the encoder that are left out, where there is one."""
    encoders_learn = True
    """Without, the gradients of the encoders are zeros."""
    kept: KeptTexts | None = None
    """What they have made of texts since they have stopped, for training."""

    @classmethod
    def build(cls, components: Components) -> Self:
        """From the configurations of a pipeline, with the weights that constructors make."""
        made = cast(Self, cast(Any, cls).from_config(components.config("unet")))
        for part in cls.held:  # a configuration may name another type, which adapters would be made in
            setattr(made, part, _named_as_in_files(components.build(part).float()))
        return made

    def encode(self, texts: Conditioning) -> tuple[Tensor, ...]:
        """What the pipeline's `encode_prompt` makes of the token ids (B, L) of each encoder: tokens (B, L, D)."""
        return (clip_tokens(self.text_encoder, texts["ids"], self.clip_skip),)

    def conditions(self, encoded: Sequence[Tensor], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the U-Net with what was encoded."""
        return named | {"encoder_hidden_states": encoded[0]}

    def forward(self, sample: Tensor | None = None, timestep: Tensor | None = None, *arguments: Any, **named: Any) -> Any:
        """The prediction; without `sample`, what `encode` makes of `texts`."""
        texts, predict = named.pop("texts", None), cast(Any, super()).forward
        if texts is None:
            return predict(sample, timestep, *arguments, **named)
        if self.kept is not None and self.training and is_grad_enabled():
            encoded = self.kept.encoded(texts, self.encode)
        else:
            encoded = self.encode(texts)
        for each in () if self.encoders_learn else encoded:
            if each.requires_grad:
                cast(Any, each).register_hook(zeros_like)
        return encoded if sample is None else predict(sample, timestep, **self.conditions(encoded, named))


class EncodingUNetXL(EncodingUNet):
    """The same of SDXL, with two encoders."""

    held = ("text_encoder", "text_encoder_2")
    text_encoder_2: nn.Module

    def encode(self, texts: Conditioning) -> tuple[Tensor, ...]:
        """(B, L, D) and (B, P). Of `given` (B,) 0 makes a row of zeros."""
        first = self.text_encoder(texts["ids"], output_hidden_states=True)
        second = self.text_encoder_2(texts["ids_2"], output_hidden_states=True)
        tokens = cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        given = texts["given"].to(tokens.dtype)
        return tokens * given[:, None, None], second[0] * given[:, None]

    def conditions(self, encoded: Sequence[Tensor], named: dict[str, Any]) -> dict[str, Any]:
        tokens, pooled = encoded
        added = {**named["added_cond_kwargs"], "text_embeds": pooled}
        return named | {"encoder_hidden_states": tokens, "added_cond_kwargs": added}


def clip_tokens(encoder: nn.Module, ids: Tensor, skipped: int) -> Tensor:
    """(B, L, D): the states before the last `skipped` layers, normalised as those after them are."""
    if not skipped:
        return cast(Tensor, encoder(ids)[0])
    states = encoder(ids, output_hidden_states=True).hidden_states[-1 - skipped]
    return cast(Tensor, cast(Any, getattr(encoder, "text_model", encoder)).final_layer_norm(states))


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
