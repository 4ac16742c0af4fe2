"""A family around a modular pipeline of diffusers: blocks that share a state, without `encode_prompt`.

The blocks that encode texts run before training, the others sample. The model is described as in `transformer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.transformer import TransformerFamily
from smalti_diffusers.sources.components import class_of


class ModularFamily(TransformerFamily):
    """Fields as in `TransformerFamily`. `captions` names inputs of the pipeline, which the blocks of texts return."""

    workflow: ClassVar[str] = "text2image"
    """Which of the pipeline's workflows samples."""
    text_blocks: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Those of its blocks that make the conditioning of captions."""
    rescales_guidance = True

    def pipeline_changes(self) -> dict[str, object]:
        """Parts without the place they were loaded from: diffusers takes those beside the index then, never another model's."""
        changes = super().pipeline_changes()
        for part in self.components.parts():
            library, kind = self.components.library(part), self.components.kind(part)
            place = {"pretrained_model_name_or_path": None, "subfolder": part, "variant": None, "revision": None}
            changes[part] = [library, kind, {"type_hint": [library, kind], **place}]
        return changes

    # --- the frozen parts -------------------------------------------------------------------------------------------

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        modular = cast(Any, cls)
        blocks = cast(Any, class_of("diffusers", modular.default_blocks_name))().get_workflow(self.workflow)
        for name in list(blocks.sub_blocks):
            if (name in self.text_blocks) != encodes:
                blocks.sub_blocks.pop(name)
        pipeline = modular(blocks=blocks)
        known = pipeline.component_names
        pipeline.register_components(**{part: each for part, each in parts.items() if part in known})
        if encodes and "guider" in known:  # without guidance a block encodes no negative prompts
            pipeline.update_components(guider=pipeline.guider.new(enabled=False))
        return pipeline

    # --- texts ------------------------------------------------------------------------------------------------------

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        prompts = [caption or self.empty_prompt for caption in captions]
        with torch.no_grad():
            state = cast(Any, self.encoder)(prompt=prompts, max_sequence_length=self.text_length, **self.encode_arguments)
        return {name: state.get(each.pipeline) for name, each in self.captions.items()}

    # --- images -----------------------------------------------------------------------------------------------------

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return dict(self.sample_arguments)

    def call_pipeline(self, request: SampleRequest, **given: object) -> Tensor:
        pipeline = cast(Any, self.frozen)
        scales = {"guidance_scale": request.guidance, "guidance_rescale": request.guidance_rescale or 0.0}
        pipeline.update_components(guider=pipeline.guider.new(**scales))
        return cast(Tensor, pipeline(output="images", **given, **self.sampling(request)))
