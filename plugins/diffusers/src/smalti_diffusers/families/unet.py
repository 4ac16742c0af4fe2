"""A family around the U-Net of Stable Diffusion: trained by the noise schedule of its scheduler, on epsilon or v.

Shapes: B batch, latents (B, C, h, w), L tokens of a caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import ClassVar, cast

from torch import Tensor, nn

from smalti import Config, UserError
from smalti.config import ObjectiveOptions
from smalti.parallel import to_device
from smalti_diffusers.families.noiseschedule import check_noise_schedule
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily
from smalti_diffusers.sources.components import Components, class_of


class UNetFamily(PipelineFamily):
    part = "unet"
    # Stages of the U-Net hold up to half of it, and their Transformer2DModels up to a seventh. Of these two, which are all
    # of the model but 2 % of it, the largest is 2 % too. SDXL's 70 transformer blocks are 10 to 35 million parameters each.
    blocks = ("BasicTransformerBlock", "ResnetBlock2D")
    # Its halvings; sizes in its own training were multiples of 64 pixels.
    patch = 8
    predictions = ("epsilon", "v_prediction")
    convolutional = True
    rescales_guidance = True
    published: ClassVar[str]
    """A pipeline that the family trains, for those who name another one."""

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        if components.pipeline != self.pipeline:  # refiners and inpainting models are called otherwise
            raise UserError(
                f"{components.folder} is a {components.pipeline}, not a {self.pipeline}",
                fix=f"name a text-to-image pipeline of {self.name}, such as {self.published}",
            )
        super().__init__(components, options, config)
        if self.prediction not in self.predictions:
            raise UserError(
                f"{self.name} cannot be trained with the prediction '{self.prediction}'",
                fix="use a pipeline with, or --prediction_type=, epsilon or v_prediction",
            )
        self.zero_snr = False
        if config is not None:
            check_noise_schedule(config, components.config("scheduler"), str(components.folder))
            self.zero_snr = config[ObjectiveOptions].rescale_betas_zero_snr
        kind = str(components.kind("scheduler"))
        if self.zero_snr and "rescale_betas_zero_snr" not in signature(class_of("diffusers", kind)).parameters:
            raise UserError(
                f"the scheduler of {components.folder} ({kind}) cannot sample from pure noise (zero terminal SNR)",
                fix="leave out --rescale_betas_zero_snr, or name a pipeline with DDIMScheduler or EulerDiscreteScheduler",
            )

    def build_base(self) -> nn.Module:
        model = self.build_adaptable(self.components) if self.encoders else super().build_base()
        # Blocks are taken in the order in which the model holds them; its own has the middle after the way up.
        up = model.up_blocks
        del model.up_blocks
        model.up_blocks = up
        return model

    def token_ids(self, tokenizer: str, texts: Sequence[str]) -> Tensor:
        """(B, L) of captions, where the model encodes them."""
        tokeniser = getattr(self.encoder, tokenizer)
        length = tokeniser.model_max_length
        found = tokeniser(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return to_device(found.input_ids, self.device)

    def image_tokens(self, width: int, height: int) -> int:
        """Of the largest stage with attention: one for each position, after the halvings before it."""
        stages = cast(list[str], self.model_config["down_block_types"])
        edge = self.vae_scale << next(number for number, kind in enumerate(stages) if "Attn" in kind)
        return (width // edge) * (height // edge)

    def scheduler_changes(self) -> dict[str, object]:
        if not self.zero_snr:
            return {"prediction_type": self.prediction}
        # Only a schedule that begins in the last step begins in pure noise (Lin et al. 2023, section 3.3).
        return {"prediction_type": self.prediction, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
