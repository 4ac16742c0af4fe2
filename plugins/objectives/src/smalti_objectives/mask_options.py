"""The options of masked losses. Imports no torch."""

from __future__ import annotations

from smalti import OptionGroup, Options, option


class MaskOptions(Options):
    mask_floor: float = option(
        0.1,
        help="Least weight of a place in the loss, wherever a mask is darker than that. 0 ignores black places,"
        " and leaves out images whose mask is all black.",
        ge=0,
        le=1,
    )
    mask_probability: float = option(
        1.0, help="Share of visits that use the mask of their image; the others train the whole image.", ge=0, le=1
    )
    mask_normalise: bool = option(
        True,
        help="Divide the masked loss of an image by the mean of its mask: small masks count like large ones."
        " kohya's trainer does not.",
    )
    prior_outside_mask: float = option(
        0.0,
        help="Weight of a loss that holds predictions outside of the masks to those of the model without its adapter."
        " Only with --model_type=lora.",
        tradeoff="another forward pass for each image",
        ge=0,
    )


GROUP = OptionGroup(name="masks", title="Masked loss", options=MaskOptions)
