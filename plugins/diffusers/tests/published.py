"""Configurations of published models, for what can be told of them without their weights: those that smalti-diffusers ships."""

import json

from smalti_diffusers.flavours import FLAVOURS, shipped_folder


def published(family, flavour=None, part="transformer"):
    """The configuration of a part, and the folder of the pipeline. The default is the family's first flavour."""
    flavours = FLAVOURS[family]
    folder = shipped_folder(flavours[flavour or next(iter(flavours))])
    return json.loads((folder / part / "config.json").read_text()), folder


UNETS = ("sd1x", "sd2x", "sdxl")


def _model(family):
    config, _ = published(family, part="unet" if family in UNETS else "transformer")
    name = config["_class_name"]
    return MADE.get(name, name), config


MADE = {"Transformer2DModel": "PixArtTransformer2DModel"}
"""What diffusers makes of a class that is published."""
PUBLISHED = {family: _model(family) for family in FLAVOURS}
"""By family, the class in diffusers and the configuration of one published model."""
SDXL = PUBLISHED["sdxl"][1]
ANIMA = PUBLISHED["anima"][1]
FLUX_DEV = PUBLISHED["flux"][1]
