"""Chroma (Lodestone Rock 2025): Flux.1 schnell without guidance, modulated by one network for all blocks, with a mask of T5.

Shapes: B batch, latents (B, C, h, w), L text tokens, N image tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import is_dry_run
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components

_MODULATION = "distilled_guidance_layer"
"""The network that makes the modulation of all blocks. It was distilled once and stays frozen, as in the authors' training."""


class Chroma(TransformerFamily):
    name = "chroma"
    pipeline = "ChromaPipeline"
    blocks = ("ChromaTransformerBlock", "ChromaSingleTransformerBlock")
    # Those of Flux.1, whose layers have the same names.
    targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp")
    single_targets = ("proj_out",)
    tokens = PACKED
    patch = 2
    gives_sigmas = True
    # The pipeline has masks of floating point, which attention adds to its scores: nothing is masked then.
    captions = {
        "tokens": TokenRows(width="joint_attention_dim"),
        "mask": Mask(returned=2, model=None, dtype=torch.bool),
    }
    max_length = 512
    encode_arguments = {"do_classifier_free_guidance": False}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if components.config("scheduler").get("use_beta_sigmas") and find_spec("scipy") is None and not is_dry_run():
            raise UserError(f"the scheduler of {components.folder} needs scipy", fix="pip install scipy")

    def build_base(self) -> nn.Module:
        model = super().build_base()
        model.get_submodule(_MODULATION).requires_grad_(False)
        model.register_forward_pre_hook(_with_masks_where_recomputed)
        for block in (*cast(nn.ModuleList, model.transformer_blocks), *cast(nn.ModuleList, model.single_transformer_blocks)):
            cast(nn.Module, block.attn).register_forward_pre_hook(_with_the_mask_of_keys, with_kwargs=True)
        embedding = cast(Any, model.time_text_embed)
        embedding.guidance_proj.register_forward_pre_hook(
            lambda module, inputs: torch.zeros(len(inputs[0]), device=embedding.mod_proj.device)
        )
        return model

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        found = super().encode_captions(captions)
        return {**found, "mask": found["mask"].bool()}

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """The mask is (B, L + N): everything of the image counts."""
        image = positions(noisy)
        mask = conditioning["mask"]
        return {
            "txt_ids": torch.zeros(mask.shape[1], 3, device=noisy.device),
            "img_ids": image,
            "attention_mask": torch.cat([mask, mask.new_ones(len(mask), len(image))], dim=1),
        }


class _Recomputed:
    """Runs blocks that recompute activations. Single blocks get the mask too, which diffusers gives to the others only."""

    def __init__(self, run: Callable[..., object]) -> None:
        self._run = run
        self._mask: object = None

    def __call__(self, block: nn.Module, hidden_states: Tensor, *arguments: object) -> object:
        if len(arguments) == _DUAL:
            self._mask = arguments[-1]
        elif len(arguments) == _SINGLE:
            arguments = (*arguments, self._mask)
        return self._run(block, hidden_states, *arguments)


_DUAL, _SINGLE = 4, 2
"""Arguments of a block after its first one: text, modulation, positions and mask; modulation and positions."""


def _with_masks_where_recomputed(model: nn.Module, inputs: object) -> None:
    run = getattr(model, "_gradient_checkpointing_func", None)
    if run is not None and not isinstance(run, _Recomputed):
        cast(Any, model)._gradient_checkpointing_func = _Recomputed(run)


def _with_the_mask_of_keys(
    attention: nn.Module, inputs: tuple[object, ...], given: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Before attention: which keys count (B, 1, 1, L + N), in place of which pairs of queries and keys (B, 1, L + N, L + N).

    It is the row of the first token, which is never padding. What padding attends to matters to nobody, but a row in which
    nothing counts has NaN for a gradient in some kernels.
    """
    mask = given.get("attention_mask")
    return inputs, {**given, "attention_mask": mask[:, :, :1]} if isinstance(mask, Tensor) else given
