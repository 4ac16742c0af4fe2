"""A family around a transformer, described by fields: most need no more than their values.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split
from smalti_diffusers.families.captions import Mask
from smalti_diffusers.families.padding import pad_captions
from smalti_diffusers.families.tokens import PLAIN, Tokens
from smalti_diffusers.pipeline import PipelineFamily

Time = Literal["1000t", "t", "1-t", "(1000-1000t)/1000"]
"""What a model is given for the time t in [0, 1], 1 being pure noise. The last two differ in rounding, as pipelines do."""
_TIMES: Mapping[Time, Callable[[Tensor], Tensor]] = {
    "1000t": lambda timesteps: timesteps,
    "t": lambda timesteps: timesteps / 1000,
    "1-t": lambda timesteps: 1 - timesteps / 1000,
    "(1000-1000t)/1000": lambda timesteps: (1000 - timesteps) / 1000,
}
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers of attention over one sequence, as diffusers names them."""
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""With those of the text beside the image."""


def split_sequences(ids: int) -> tuple[Split, ...]:
    """Image and text, which the model takes as tokens with their positions; those are in the dimension `ids` of theirs."""
    ndim = 2 if ids == 0 else None
    return (
        Split(module="", tensor="hidden_states", stream="image", dim=1),
        Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
        Split(module="", tensor="img_ids", stream="image", dim=ids, ndim=ndim),
        Split(module="", tensor="txt_ids", stream="text", dim=ids, ndim=ndim),
    )


def joint_attention(*blocks: str) -> Mapping[str, tuple[str, ...]]:
    """Attention over the text and then the image, in these lists of blocks."""
    return {f"{each}.*.attn": ("text", "image") for each in blocks}


class TransformerFamily(PipelineFamily):
    """Its fields are what distinguishes one family from another; a method is overridden where a field cannot say it."""

    tokens: ClassVar[Tokens] = PLAIN
    """The form in which the model takes latents and gives its prediction."""
    time: ClassVar[Time] = "t"
    sign: ClassVar[int] = 1
    """-1 for a model that predicts the direction of the image: velocity points to the noise."""
    guided: ClassVar[bool] = False
    """Whether the model has an argument `guidance`, which it is given if its configuration has `guidance_embeds`."""
    max_length: int
    """Tokens of a caption, unless `--tokenizer_max_length` is given."""
    ragged: ClassVar[bool] = False
    """Whether `encode_prompt` returns no more tokens than the captions have. They are padded with zeros then, for a cache."""
    empty_prompt: ClassVar[str] = ""
    """What stands for the empty caption."""
    encode_arguments: ClassVar[Mapping[str, object]] = {}
    """More arguments of the pipeline's `encode_prompt`."""
    sample_arguments: ClassVar[Mapping[str, object]] = {}
    """More arguments of the pipeline."""
    single_targets: ClassVar[tuple[str, ...]] = ()
    """Targets of an adapter in `single_transformer_blocks` that are named with their block: other layers end in the same."""
    splits: ClassVar[tuple[Split, ...]] = ()
    """Where context parallelism splits tokens. Empty: it cannot."""
    attention: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Attention over what is split: its modules, and the streams of each in their order."""

    def lora_targets(self) -> tuple[str, ...]:
        count = cast(int, self.model_config["num_single_layers"]) if self.single_targets else 0
        single = (f"single_transformer_blocks.{number}.{name}" for number in range(count) for name in self.single_targets)
        return (*self.targets, *single)

    @property
    def takes_guidance(self) -> bool:
        """Whether the model is guidance-distilled: the scale is one of its inputs."""
        return self.guided and bool(self.model_config.get("guidance_embeds"))

    # --- texts ------------------------------------------------------------------------------------------------------

    @property
    def text_length(self) -> int:
        return self.options.tokenizer_max_length or self.max_length

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        prompts = [caption or self.empty_prompt for caption in captions]
        with torch.no_grad():
            returned = cast(Any, self.encoder).encode_prompt(
                prompts, device=self.device, max_sequence_length=self.text_length, **self.encode_arguments
            )
        found = {name: returned[each.returned] for name, each in self.captions.items() if each.returned is not None}
        if not self.ragged:
            return found
        return pad_captions(found["tokens"], found.get("mask"), self.text_length, cast(Mask, self.captions["mask"]).dtype)

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        return {name: each.example(self.model_config, self.text_length) for name, each in self.captions.items()}

    # --- the model --------------------------------------------------------------------------------------------------

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        given: dict[str, object] = {"hidden_states": self.tokens.pack(noisy), "timestep": self.model_time(timesteps)}
        given |= {each.model: conditioning[name] for name, each in self.captions.items() if each.model is not None}
        if self.guided:
            value = torch.full((len(noisy),), self.options.flux_guidance_value, device=noisy.device)
            given["guidance"] = value if self.takes_guidance else None
        return given | self.more_inputs(noisy, conditioning)

    def model_time(self, timesteps: Tensor) -> Tensor:
        """(B,) in [0, 1000], 1000 being pure noise, as the model takes it."""
        return _TIMES[self.time](timesteps)

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """What else the model is called with, such as positions; or what takes the place of an argument."""
        return {}

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        latents = self.tokens.unpack(prediction, noisy)
        return latents if self.sign > 0 else -latents

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        if not self.splits:
            return None
        return ContextPlan(
            heads=cast(int, self.model_config["num_attention_heads"]),
            splits=self.splits,
            attention=tuple(Attention(module=module, streams=streams) for module, streams in self.attention.items()),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    # --- images -----------------------------------------------------------------------------------------------------

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"max_sequence_length": self.text_length, **self.sample_arguments}
