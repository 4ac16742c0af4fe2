"""Flux.1 (Black Forest Labs 2024): rectified flow on packed latents, T5 tokens and image tokens in one sequence.

Shapes: B batch, latents (B, C, h, w), N = (h / 2) (w / 2) packed tokens of 4 C numbers, L text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split
from smalti_diffusers.families.pooled import pooled_prompts
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import Components

_BLOCKS = ("transformer_blocks", "single_transformer_blocks")


class Flux(PipelineFamily):
    name = "flux"
    pipeline = "FluxPipeline"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
        "proj_mlp",
    )
    patch = 2

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if options.flux_true_cfg_scale == 1:
            self.no_negative_prompt = "Flux is sampled without classifier-free guidance unless --flux_true_cfg_scale is above 1"

    def lora_targets(self) -> tuple[str, ...]:
        """Attention and feed-forward of every block, and no layer outside of them: those of the pipeline's training script in
        diffusers, and in single blocks, whose two outputs are one layer, the feed-forward too.

        That output is named with its block, for the model's last layer is called `proj_out` as well.
        """
        count = cast(int, self.components.config(self.part)["num_single_layers"])
        return (*self.targets, *(f"{_BLOCKS[1]}.{number}.proj_out" for number in range(count)))

    @property
    def text_length(self) -> int:
        """512 for dev; schnell was trained on 256, which its T5 tokenizer does not say."""
        if self.options.tokenizer_max_length is not None:
            return self.options.tokenizer_max_length
        return 512 if self._distilled else 256

    @property
    def _distilled(self) -> bool:
        return bool(self.components.config(self.part).get("guidance_embeds"))

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        with torch.no_grad():
            tokens, pooled, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                prompt=list(captions), prompt_2=None, device=self.device, max_sequence_length=self.text_length
            )
        return {"tokens": tokens, "pooled": pooled}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        config = self.components.config(self.part)
        tokens = torch.empty(1, self.text_length, cast(int, config["joint_attention_dim"]))
        return {"tokens": tokens, "pooled": torch.empty(1, cast(int, config["pooled_projection_dim"]))}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        height, width = noisy.shape[-2:]
        tokens = conditioning["tokens"]
        guidance = torch.full((len(noisy),), self.options.flux_guidance_value, device=noisy.device)
        return {
            "hidden_states": pack(noisy),
            "timestep": timesteps / 1000,
            "guidance": guidance if self._distilled else None,
            "pooled_projections": conditioning["pooled"],
            "encoder_hidden_states": tokens,
            "txt_ids": torch.zeros(tokens.shape[1], 3, device=noisy.device),
            "img_ids": positions(height // 2, width // 2, noisy.device),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        return unpack(prediction, *noisy.shape[-2:])

    def context_plan(self, model: nn.Module) -> ContextPlan:
        both = ("text", "image")
        return ContextPlan(
            heads=cast(int, self.components.config(self.part)["num_attention_heads"]),
            splits=(
                Split(module="", tensor="hidden_states", stream="image", dim=1),
                Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
                Split(module="", tensor="img_ids", stream="image", dim=0, ndim=2),
                Split(module="", tensor="txt_ids", stream="text", dim=0, ndim=2),
            ),
            attention=tuple(Attention(module=f"{blocks}.*.attn", streams=both) for blocks in _BLOCKS),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """Guidance is an argument of the model itself; away from the empty prompt only if that is asked for."""
        return pooled_prompts(conditioning, unconditional)

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        """A model that is not guidance-distilled does not get `--validation_guidance`."""
        scale = self.options.flux_true_cfg_scale
        own = {"true_cfg_scale": scale} if self._distilled else {"guidance": scale}
        return {**super().sampling_settings(request), **own}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"true_cfg_scale": self.options.flux_true_cfg_scale, "max_sequence_length": self.text_length}


def pack(latents: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, N, 4 C): each 2x2 square of latent pixels is one token."""
    batch, channels, height, width = latents.shape
    squares = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, N, 4 C) -> (B, C, h, w)."""
    batch, _, depth = tokens.shape
    squares = tokens.view(batch, height // 2, width // 2, depth // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, depth // 4, height, width)


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """(N, 3): nothing, row and column of every image token."""
    row = torch.arange(rows, device=device, dtype=torch.float32)
    column = torch.arange(columns, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat([torch.zeros(len(grid), 1, device=device), grid], dim=1)


def family(config: Config) -> Flux:
    return cast(Flux, create(Flux, config))
