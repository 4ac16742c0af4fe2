"""Flux.2 (Black Forest Labs 2025): rectified flow on patches of latents, tokens of a language model beside them.

The klein models read captions with Qwen3; base ones are guided away from the empty prompt, distilled ones are not guided. Dev
reads them with Mistral and has the guidance scale as an input.

Shapes: B batch, latents (B, 4 C, h, w) of 2x2 squares of the autoencoder's own (B, C, 2 h, 2 w), N = h w tokens of 4 C numbers,
L text tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split, is_dry_run
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.start import shape_of

DEV = "Flux2Pipeline"
_WIDTHS = {7680: "klein-base-4b", 12288: "klein-base-9b", 15360: "dev"}
"""Flavours by the width of a caption's tokens: three layers of the text encoder beside each other."""

_BLOCKS = ("transformer_blocks", "single_transformer_blocks")


class Flux2(PipelineFamily):
    name = "flux2"
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    patch = 1
    targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "to_qkv_mlp_proj",
    )

    @classmethod
    def flavour_of(cls, file: ModelFile, flavours: Mapping[str, str]) -> str | None:
        """By the width of the captions' tokens; whether a klein model is distilled does not show in its file."""
        shape = shape_of(file, "txt_in.weight")
        return _WIDTHS.get(shape[1]) if shape is not None else None

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        self.pipeline = DEV if components.pipeline == DEV else "Flux2KleinPipeline"
        super().__init__(components, options, config)
        self._known: tuple[Tensor, Tensor] | None = None
        if self.pipeline == DEV or components.settings.get("is_distilled"):
            self.no_negative_prompt = "this Flux.2 is guidance-distilled and sampled without classifier-free guidance"
        if components.kind("tokenizer") == "PixtralProcessor" and find_spec("torchvision") is None and not is_dry_run():
            raise UserError(
                f"the tokenizer of {components.folder} is one for images too, which transformers makes only with torchvision",
                fix="pip install torchvision, or take a klein model",
            )

    def lora_targets(self) -> tuple[str, ...]:
        """With the outputs of single blocks, which other blocks call a list of layers."""
        count = cast(int, self.components.config(self.part)["num_single_layers"])
        return (*self.targets, *(f"{_BLOCKS[1]}.{number}.attn.to_out" for number in range(count)))

    # --- latents ----------------------------------------------------------------------------------------------------

    @property
    def vae_scale(self) -> int:
        """Of a square, which is one latent pixel here and one token."""
        return 2 * super().vae_scale

    @property
    def latent_channels(self) -> int:
        return 4 * super().latent_channels

    def normalise_latents(self, raw: Tensor) -> Tensor:
        """Normalised to zero mean and unit variance, by the statistics that the autoencoder keeps."""
        known = self._known
        mean, width = self._statistics(raw.device)
        if known is None:
            self._park_vae()  # where everything was encoded before, the autoencoder was loaded for its statistics alone
        return (pixel_unshuffle(raw.float(), 2) - mean) / width

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.vae
        mean, width = self._statistics(latents.device)
        own = pixel_shuffle(latents * width + mean, 2).to(next(vae.parameters()).dtype)
        pixels: Tensor = vae.decode(own, return_dict=False)[0]  # type: ignore[operator]
        return pixels.float().clamp(-1, 1)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, both (4 C, 1, 1). They stay on the device, as every step wants them."""
        if self._known is None or self._known[0].device != device:
            norm = cast(nn.BatchNorm2d, self.vae.bn)
            mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
            mean, width = mean.float(), torch.sqrt(variance.float() + norm.eps)
            self._known = mean.view(-1, 1, 1).to(device), width.view(-1, 1, 1).to(device)
        return self._known

    # --- texts ------------------------------------------------------------------------------------------------------

    @property
    def text_length(self) -> int:
        """With the tokens of the chat around a prompt."""
        return self.options.tokenizer_max_length or 512

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """What is padding is encoded too, and the model attends to it: there is no mask."""
        with torch.no_grad():
            tokens, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                list(captions), device=self.device, max_sequence_length=self.text_length
            )
        return {"tokens": tokens}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["joint_attention_dim"])
        return {"tokens": torch.empty(1, self.text_length, width_of_text)}

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    # --- the model --------------------------------------------------------------------------------------------------

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        tokens = conditioning["tokens"]
        batch, length = tokens.shape[:2]
        height, width = noisy.shape[-2:]
        guidance = torch.full((batch,), self.options.flux_guidance_value, device=noisy.device)
        return {
            "hidden_states": noisy.flatten(2).transpose(1, 2),
            "timestep": timesteps / 1000,
            "guidance": guidance if self.pipeline == DEV else None,
            "encoder_hidden_states": tokens,
            "txt_ids": _positions(batch, (1, 1, 1, length), noisy.device),
            "img_ids": _positions(batch, (1, height, width, 1), noisy.device),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        return prediction.transpose(1, 2).reshape(noisy.shape)

    def context_plan(self, model: nn.Module) -> ContextPlan:
        both = ("text", "image")
        return ContextPlan(
            heads=cast(int, self.components.config(self.part)["num_attention_heads"]),
            splits=(
                Split(module="", tensor="hidden_states", stream="image", dim=1),
                Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
                Split(module="", tensor="img_ids", stream="image", dim=1),
                Split(module="", tensor="txt_ids", stream="text", dim=1),
            ),
            attention=tuple(Attention(module=f"{blocks}.*.attn", streams=both) for blocks in _BLOCKS),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    # --- images ---------------------------------------------------------------------------------------------------

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """Dev is not guided away from anything."""
        if self.pipeline == DEV:
            return {"prompt_embeds": conditioning["tokens"]}
        return {"prompt_embeds": conditioning["tokens"], "negative_prompt_embeds": unconditional["tokens"]}

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        """A distilled klein is not guided, whatever `--validation_guidance` says."""
        own = {"guidance": 1.0} if self.components.settings.get("is_distilled") else {}
        return {**super().sampling_settings(request), **own}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"max_sequence_length": self.text_length}


def _positions(batch: int, counts: Sequence[int], device: torch.device) -> Tensor:
    """(B, product of counts, 4): place in time, row, column and place in the text of every token."""
    axes = torch.meshgrid(*(torch.arange(count, device=device) for count in counts), indexing="ij")
    return torch.stack(axes, dim=-1).view(1, -1, 4).expand(batch, -1, -1)


def family(config: Config) -> Flux2:
    return cast(Flux2, create(Flux2, config))
