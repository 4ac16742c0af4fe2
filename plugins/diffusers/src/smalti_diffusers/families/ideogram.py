"""Ideogram 4 (Ideogram 2026): rectified flow from noise at 0 to the image at 1, text and image packed in one sequence.

The pipeline guides away from what a second transformer predicts without any text. The first one is trained.

Shapes: B batch, latents (B, 4 C, h, w) of 2x2 squares of the autoencoder's own (B, C, 2 h, 2 w), L text tokens, N image tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.autoencoders import PatchAutoencoder
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.padding import beside, lengths
from smalti_diffusers.families.tokens import FLAT
from smalti_diffusers.families.transformer import ATTENTION, TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components

_TEXT, _IMAGE = 3, 2
"""What the model calls the tokens of the two kinds."""
_FIRST = 65536
"""Positions of the image start here."""
_MULTIPLE = 64
"""Texts that are trained have multiples of this many tokens, so that few lengths occur, whatever the data."""
_UNCONDITIONAL = "unconditional_transformer"


class SquareAutoencoder(PatchAutoencoder):
    """That of Flux.2, with the four pixels of a square outside of the channels of each."""

    def squares(self, raw: Tensor) -> Tensor:
        return _exchanged(super().squares(raw), raw.shape[1])

    def pixels(self, latents: Tensor) -> Tensor:
        return super().pixels(_exchanged(latents, 4))


def _exchanged(latents: Tensor, outer: int) -> Tensor:
    """With the channels in the other order: `outer` of them are the outer ones before."""
    batch, channels, *size = latents.shape
    return latents.reshape(batch, outer, channels // outer, *size).transpose(1, 2).reshape(latents.shape)


@dataclass(frozen=True, kw_only=True)
class AreaShift:
    """exp(mu) of the pipeline's own mu, half the logarithm of the area over that of 512 x 512 pixels: 1024 tokens."""

    def at(self, tokens: int) -> float:
        return math.sqrt(tokens / 1024)


class Ideogram(TransformerFamily):
    name = "ideogram"
    pipeline = "Ideogram4Pipeline"
    blocks = ("Ideogram4TransformerBlock",)
    targets = (*ATTENTION, "w1", "w2", "w3")
    autoencoder = SquareAutoencoder
    tokens = FLAT
    patch = 1
    time = "1-t"
    sign = -1
    gives_sigmas = True
    unused_parts = (_UNCONDITIONAL, "prompt_enhancer_head")
    no_negative_prompt = "Ideogram 4 is guided away from the prediction of a second model, which reads no prompt"
    captions = {
        "tokens": TokenRows(model=None, width="llm_features_dim"),
        "mask": Mask(returned=None, model=None, dtype=torch.bool),
    }
    max_length = 512  # with the tokens of the chat around a prompt
    host_conditioning = ("mask",)

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        self.flow_shift = AreaShift()

    def build_base(self) -> nn.Module:
        model = super().build_base()
        _rotate_on_meta(cast(nn.Module, model.rotary_emb))
        return model

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Padding goes before a text. Raises UserError for one that is too long: the pipeline cuts none."""
        encoder = cast(Any, self.encoder)
        try:
            with torch.no_grad():
                tokens, _, _, kinds = encoder.encode_prompt(list(captions), 0, 0, self.text_length, self.device)
        except ValueError as error:
            for caption in captions if len(captions) > 1 else ():
                self.encode_captions([caption])  # tells which
            raise UserError(
                f"the caption {captions[0][:40]!r} is longer than --tokenizer_max_length={self.text_length}: {error}",
                fix="a larger --tokenizer_max_length, up to 2048; or a shorter caption",
            ) from error
        return {"tokens": tokens.to(encoder.text_encoder.dtype), "mask": kinds == _TEXT}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """Everything is there for each token, of a text or the image."""
        tokens, mask = _shortened(conditioning)
        image = self.tokens.pack(noisy)
        assert isinstance(image, Tensor)
        features, *others = packed(tokens, mask, *noisy.shape[-2:])
        return {
            "hidden_states": torch.cat([image.new_zeros(*mask.shape, image.shape[-1]), image], dim=1),
            "timestep": self.model_time(timesteps),
            "encoder_hidden_states": features,
            **dict(zip(("position_ids", "segment_ids", "indicator"), others, strict=True)),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        return super().outputs(prediction[:, -math.prod(noisy.shape[-2:]) :], noisy)

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        """The pipeline takes no prompts that are encoded. Here it gets them for prompts, and packs them where it encodes."""
        pipeline = super().assemble(cls, parts, encodes=encodes)
        if not encodes:
            pipeline.encode_prompt = _packed_prompts
        return pipeline

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        tokens, mask = _shortened(conditioning)
        return {"prompt": list(zip(tokens, mask, strict=True)), "max_sequence_length": mask.shape[1]}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"guidance_schedule": None}

    def _sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        """The second transformer is in memory only meanwhile."""
        pipeline = cast(Any, self.frozen)
        pipeline.unconditional_transformer = self.components.load(_UNCONDITIONAL, self._dtype("texts"))
        try:
            return super()._sample(model, request)
        finally:
            pipeline.unconditional_transformer = None


def _shortened(conditioning: Conditioning) -> tuple[Tensor, Tensor]:
    """Tokens and mask, without what is padding in every row but for a multiple of 64."""
    tokens, mask = conditioning["tokens"], conditioning["mask"]
    longest = min(-(-max(lengths(mask)) // _MULTIPLE) * _MULTIPLE, tokens.shape[1])
    return tokens[:, -longest:], beside(mask, tokens.device)[:, -longest:]


def packed(tokens: Tensor, mask: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (B, L + N, D), positions (B, L + N, 3), segments and kinds (B, L + N), as the pipeline makes them of a text."""
    batch, count = len(mask), height * width
    text = torch.where(mask, mask.cumsum(dim=1) - 1, 0)[..., None].expand(-1, -1, 3)
    axes = [torch.arange(size, device=mask.device) for size in (1, height, width)]
    image = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(1, -1, 3) + _FIRST
    rows = mask.long()
    return (
        torch.cat([tokens, tokens.new_zeros(batch, count, tokens.shape[-1])], dim=1),
        torch.cat([text, image.expand(batch, -1, -1)], dim=1),
        torch.cat([2 * rows - 1, rows.new_ones(batch, count)], dim=1),
        torch.cat([_TEXT * rows, rows.new_full((batch, count), _IMAGE)], dim=1),
    )


def _packed_prompts(
    prompt: Sequence[tuple[Tensor, Tensor]], grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, mask = (torch.stack(rows).to(device) for rows in zip(*prompt, strict=True))
    return packed(tokens, mask, grid_h, grid_w)


def _rotate_on_meta(embedding: nn.Module) -> None:
    """Make positions without values turn to angles without values: diffusers switches autocast off, which meta has not."""
    embed, width = embedding.forward, cast(int, embedding.head_dim)

    def forward(position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if not position_ids.is_meta:
            return cast(tuple[Tensor, Tensor], embed(position_ids))
        angles = torch.empty(*position_ids.shape[:2], width, device="meta")
        return angles, angles

    embedding.forward = forward
