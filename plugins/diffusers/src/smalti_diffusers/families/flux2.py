"""Flux.2 (Black Forest Labs 2025): rectified flow on patches of latents, tokens of a language model beside them.

The klein models read captions with Qwen3; base ones are guided away from the empty prompt, distilled ones are not guided. Dev
reads them with Mistral and has the guidance scale as an input. What is padding of a caption is encoded too: there is no mask.

Shapes: B batch, latents (B, 4 C, h, w) of 2x2 squares of the autoencoder's own (B, C, 2 h, 2 w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest, is_dry_run
from smalti_diffusers.families.autoencoders import PatchAutoencoder
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.tokens import FLAT
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention, split_sequences
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.start import shape_of

DEV = "Flux2Pipeline"
_WIDTHS = {7680: "klein-base-4b", 12288: "klein-base-9b", 15360: "dev"}
"""Flavours by the width of a caption's tokens: three layers of the text encoder beside each other."""


class Flux2(TransformerFamily):
    name = "flux2"
    pipeline = "Flux2KleinPipeline"
    other_pipelines = (DEV,)
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    targets = (*JOINT_ATTENTION, "to_qkv_mlp_proj")
    single_targets = ("attn.to_out",)
    autoencoder = PatchAutoencoder
    tokens = FLAT
    patch = 1
    guided = True
    captions = {"tokens": TokenRows(width="joint_attention_dim")}
    max_length = 512  # with the tokens of the chat around a prompt
    splits = split_sequences(ids=1)
    attention = joint_attention("transformer_blocks", "single_transformer_blocks")

    @classmethod
    def flavour_of(cls, file: ModelFile, flavours: Mapping[str, str]) -> str | None:
        """By the width of the captions' tokens; whether a klein model is distilled does not show in its file."""
        shape = shape_of(file, "txt_in.weight")
        return _WIDTHS.get(shape[1]) if shape is not None else None

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        self._distilled = bool(components.settings.get("is_distilled"))
        if self.pipeline == DEV or self._distilled:
            self.no_negative_prompt = "this Flux.2 is guidance-distilled and sampled without classifier-free guidance"
        if components.kind("tokenizer") == "PixtralProcessor" and find_spec("torchvision") is None and not is_dry_run():
            raise UserError(
                f"the tokenizer of {components.folder} is one for images too, which transformers makes only with torchvision",
                fix="pip install torchvision, or take a klein model",
            )

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        batch, length = conditioning["tokens"].shape[:2]
        height, width = noisy.shape[-2:]
        return {
            "txt_ids": _positions(batch, (1, 1, 1, length), noisy.device),
            "img_ids": _positions(batch, (1, height, width, 1), noisy.device),
        }

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """Dev is not guided away from anything."""
        given = super().prompts(conditioning, unconditional)
        return {"prompt_embeds": given["prompt_embeds"]} if self.pipeline == DEV else given

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        """A distilled klein is not guided, whatever `--validation_guidance` says."""
        return {**super().sampling_settings(request), **({"guidance": 1.0} if self._distilled else {})}


def _positions(batch: int, counts: Sequence[int], device: torch.device) -> Tensor:
    """(B, product of counts, 4): place in time, row, column and place in the text of every token."""
    axes = torch.meshgrid(*(torch.arange(count, device=device) for count in counts), indexing="ij")
    return torch.stack(axes, dim=-1).view(1, -1, 4).expand(batch, -1, -1)
