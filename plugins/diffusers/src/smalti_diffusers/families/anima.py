"""Anima (CircleStone Labs 2026): rectified flow with the transformer of Cosmos-Predict2, which takes an image as a video.

A text conditioner turns tokens of T5's vocabulary and what Qwen3 makes of the caption into the text that the model attends to.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import pad

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti_diffusers.families.autoencoders import VideoAutoencoder
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.modular import ModularFamily
from smalti_diffusers.families.tokens import VIDEO
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class Anima(ModularFamily):
    name = "anima"
    pipeline = "AnimaModularPipeline"
    blocks = ("CosmosTransformerBlock",)
    text_blocks = ("text_encoder", "denoise.text_conditioning")
    text_parts = ("text_encoder", "tokenizer", "t5_tokenizer", "text_conditioner")
    texts = ("text_encoder", "text_conditioner")
    autoencoder = VideoAutoencoder
    tokens = VIDEO
    patch = 2
    gives_sigmas = True
    captions = {"tokens": TokenRows(width="text_embed_dim")}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if self.text_length > self.rows:
            raise UserError(
                f"tokenizer_max_length={self.text_length}: the text conditioner of this Anima gives {self.rows} tokens",
                fix=f"--tokenizer_max_length={self.rows}, or leave it out",
            )

    @property
    def rows(self) -> int:
        """Tokens of the conditioning, however long a caption is: the model attends to the padding, too."""
        return cast(int, self.components.config("text_conditioner")["min_sequence_length"])

    @property
    def text_length(self) -> int:
        return self.options.tokenizer_max_length or self.rows

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        return {name: each.example(self.model_config, self.rows) for name, each in self.captions.items()}

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        pipeline = super().assemble(cls, parts, encodes=encodes)
        if encodes:  # the block of the conditioner returns the type of the transformer, which is not there
            pipeline.transformer = pipeline.text_conditioner
        return pipeline

    def build_base(self) -> nn.Module:
        model = super().build_base()
        without_padding(model)
        return model


def without_padding(model: nn.Module) -> None:
    """Make a transformer of Cosmos take images of which nothing is padding, without being given a mask that says so.

    Its own code resizes a mask of the image's size, for which it needs torchvision.
    """
    if cast(Any, model).config.concat_padding_mask:
        cast(Any, model).register_to_config(concat_padding_mask=False)
        cast(nn.Module, model.patch_embed).register_forward_pre_hook(_with_mask)


def _with_mask(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Before the patches: latents (B, C, 1, h, w) get a channel of zeros, which is the mask."""
    return (pad(inputs[0], (0, 0, 0, 0, 0, 0, 0, 1)),)
