"""HiDream-I1 (Cai et al. 2025): rectified flow on experts, attending to T5 and to another layer of Llama 3.1 in every block.

Shapes: B batch, latents (B, C, h, w), L text tokens, N image tokens, D width; K of E experts for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest, is_dry_run
from smalti_diffusers.families.captions import CaptionTensor, PooledRow
from smalti_diffusers.families.padding import has_values
from smalti_diffusers.families.tokens import positions
from smalti_diffusers.families.transformer import TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.model_file import ModelFile

_EXPERTS = "MOEFeedForwardSwiGLU"


@dataclass(frozen=True, kw_only=True)
class _Rows(CaptionTensor):
    """(B, ...); `shape` says what is behind B, for a model's configuration and a number of tokens."""

    shape: Callable[[Mapping[str, Any], int], tuple[int, ...]]

    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        return torch.empty(1, *self.shape(config, length))


class HiDream(TransformerFamily):
    name = "hidream"
    pipeline = "HiDreamImagePipeline"
    blocks = ("HiDreamImageTransformerBlock", "HiDreamImageSingleTransformerBlock")
    targets = ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
    texts = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
    patch = 2
    time = "1000t"
    sign = -1
    gives_sigmas = True  # or what decides them, which dpm++ does not take
    captions = {
        "tokens": _Rows(
            model="encoder_hidden_states_t5",
            pipeline="prompt_embeds_t5",
            shape=lambda config, length: (length, config["caption_channels"][0]),
        ),
        "llama": _Rows(
            returned=2,
            model=None,
            pipeline="prompt_embeds_llama3",
            shape=lambda config, length: (len(set(config["llama_layers"])), length, config["caption_channels"][1]),
        ),
        "pooled": PooledRow(returned=4, model="pooled_embeds", width="text_emb_dim"),
    }
    max_length = 128
    encode_arguments = {"do_classifier_free_guidance": False}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if not (is_dry_run() or components.missing) and not (components.folder / "text_encoder_4").is_dir():
            raise UserError(
                f"{components.folder} has no text_encoder_4: the published pipelines come without Llama 3.1 8B Instruct",
                fix="load text_encoder_4 and tokenizer_4 from meta-llama/Llama-3.1-8B-Instruct, give them to "
                "HiDreamImagePipeline.from_pretrained, save it with save_pretrained, and name that folder",
            )

    @classmethod
    def flavour_of(cls, file: ModelFile, flavours: Mapping[str, str]) -> str | None:
        """All have the same tensors: diffusers takes each for Dev."""
        return None

    def build_base(self) -> nn.Module:
        model = super().build_base()
        model.__class__ = _with(_Images, cast(Any, type(model)))
        for module in model.modules():
            if type(module).__name__ == _EXPERTS:
                module.__class__ = _with(_Experts, cast(Any, type(module)))
                cast(Any, module).gate.alpha = 0.0  # of an auxiliary loss, which diffusers computes for nothing
        return model

    def image_tokens(self, width: int, height: int) -> int:
        """Those of an image that is not square are padded to the number that the model was made for."""
        tokens = super().image_tokens(width, height)
        return tokens if width == height else max(tokens, _most_tokens(self.model_config))

    # --- texts ------------------------------------------------------------------------------------------------------

    @property
    def _used(self) -> list[int]:
        """The layers of Llama that the model takes."""
        return sorted(set(cast(list[int], self.model_config["llama_layers"])))

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """`llama` is (B, layers, L, D), of the layers that are used."""
        found = super().encode_captions(captions)
        return {**found, "llama": found["llama"][self._used].transpose(0, 1).contiguous()}

    def text_settings(self) -> dict[str, object]:
        return {**super().text_settings(), "llama_layers": self._used}

    def _by_layer(self, rows: Tensor) -> Tensor:
        """(layers, B, L, D) by the numbers of layers; what is there for one that is not used does not matter."""
        used = self._used
        places = [used.index(number) if number in used else 0 for number in range(used[-1] + 1)]
        return rows.transpose(0, 1) if places == [*range(len(used))] else torch.stack([rows[:, place] for place in places])

    # --- the model and images ---------------------------------------------------------------------------------------

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        given = super().inputs(noisy, timesteps, conditioning)
        return {"timesteps": given.pop("timestep"), **given}

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {"encoder_hidden_states_llama3": self._by_layer(conditioning["llama"])}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        texts = ({**each, "llama": self._by_layer(each["llama"])} for each in (conditioning, unconditional))
        return super().prompts(*texts)

    def call_pipeline(self, request: SampleRequest, **given: object) -> Tensor:
        """In the size that was asked for, where the pipeline makes a megapixel of any, and with noise of the seeds alone."""
        pipeline = cast(Any, self.frozen)
        edge = math.sqrt(request.width * request.height) / pipeline.vae_scale_factor
        pipeline.default_sample_size = edge * (1 + 1e-9)  # the pipeline rounds down
        scheduler = pipeline.scheduler
        if "generator" in signature(type(scheduler).step).parameters:
            scheduler.step = partial(type(scheduler).step, scheduler, generator=given["generator"])
        return super().call_pipeline(request, **given)


def _most_tokens(config: Mapping[str, Any]) -> int:
    height, width = config["max_resolution"]
    return int(height * width // config["patch_size"] ** 2)


@cache
def _with(own: type, kind: type) -> type:
    """The class of a model with methods of `own` in place of some, under the same name."""
    return type(kind.__name__, (own, kind), {})


class _Images:
    """Methods of the transformer: of images in one size, in training as in inference, without the host waiting for sizes."""

    config: Any
    max_seq: int

    def patchify(self, latents: Tensor) -> tuple[Tensor, Tensor | None, tuple[int, int], Tensor]:
        """Tokens (B, N, patch^2 C), which of them are no padding (B, N), rows and columns, and positions (B, N, 3)."""
        batch, channels, height, width = latents.shape
        edge = self.config.patch_size
        rows, columns = height // edge, width // edge
        squares = latents.reshape(batch, channels, rows, edge, columns, edge).permute(0, 2, 4, 3, 5, 1)
        tokens, places, mask = squares.reshape(batch, rows * columns, -1), positions(latents), None
        if height != width:
            missing = max(self.max_seq - rows * columns, 0)
            mask = pad(tokens.new_ones(batch, rows * columns), (0, missing))
            tokens, places = pad(tokens, (0, 0, 0, missing)), pad(places, (0, 0, 0, missing))
        return tokens, mask, (rows, columns), places.expand(batch, -1, -1)

    def unpatchify(self, tokens: Tensor, size: tuple[int, int], is_training: bool) -> Tensor:
        """(B, C, h, w)."""
        (rows, columns), edge = size, self.config.patch_size
        squares = tokens[:, : rows * columns].reshape(len(tokens), rows, columns, edge, edge, -1)
        return squares.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), -1, rows * edge, columns * edge)


class _Experts:
    """A feed-forward layer of experts that computes what diffusers' does in inference, in training too, and with gradients."""

    gate: nn.Module
    experts: nn.ModuleList
    shared_experts: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        chosen, shares, _ = self.gate(x)  # (B N, K)
        copies = x.reshape(-1, x.shape[-1]).repeat_interleave(chosen.shape[1], dim=0)
        order = chosen.flatten().argsort(stable=True)
        parts = torch.split(copies[order], _counts(chosen, len(self.experts)))
        # All are called, those of no token too: replicas wait for a gradient of every parameter.
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        found = found[order.argsort()].view(*chosen.shape, -1) * shares.unsqueeze(-1)
        mixed: Tensor = found.sum(dim=1).view(x.shape).to(x.dtype) + self.shared_experts(x)
        return mixed


def _counts(chosen: Tensor, experts: int) -> list[int]:
    """How many tokens each expert gets, for which the host waits; without values as many for each as can be."""
    if has_values(chosen):
        return cast(list[int], chosen.flatten().bincount(minlength=experts).tolist())
    each, rest = divmod(chosen.numel(), experts)
    return [each + (number < rest) for number in range(experts)]
