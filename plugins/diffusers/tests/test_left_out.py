"""Every pipeline class that diffusers publishes is one of a family here, or is left out for a reason that is said."""

import re

import diffusers

from smalti_diffusers.lora.workshop import pipelines
from smalti_diffusers.plugin import FAMILIES

LEFT_OUT = {
    "a base class": ("Diffusion", "Modular"),
    "samples a model that is trained by its plain pipeline": (
        *(r"\w+PAG", r"Onnx\w+", r"\w+Onnx", "Flux2KleinKV", "SemanticStableDiffusion"),
        "StableDiffusion(SAG|Panorama|Paradigms|AttendAndExcite|ModelEditing)",
    ),
    "edits, varies or enlarges images": (
        r"\w*(Img2Img|I2I|Inpaint|Inpainting|Edit|Kontext|Variation|Upscale|SuperResolution|Refiner)\w*",
        r"\w+(Pix2Pix|Pix2PixZero|Fill|Depth2Img|DiffEdit|PriorRedux)",
        *("PaintByExample", "RePaint", "CycleDiffusion", "Kandinsky6SR", r"VisualCloze\w*", "ZImageOmni"),
    ),
    "conditioned on more than a text": (
        r"\w*(ControlNet|Controlnet|Control|Adapter|GLIGEN)\w*",
        *("BlipDiffusion", r"QwenImageLayered\w*", "VersatileDiffusionDualGuided", "Cosmos2_5_Transfer"),
    ),
    "makes video": (
        *(r"\w*Video\w*", r"(Wan|LTX|AnimateDiff|AnyFlow|CogVideoX|Helios|SkyReelsV2)\w*", r"\w+(I2V|T2V|TI2VA|ToWorld)"),
        *("Allegro", "ConsisID", "Cosmos2_5_PredictBase", r"Cosmos3\w+", "EasyAnimate", "EchoModular", "I2VGenXL", "Latte"),
        *("MiniMaxH3Modular", "Mochi", "PIA", "SanaWM"),
    ),
    "makes sound": (r"\w*(Audio|Music)\w*", "AceStep", "DanceDiffusion", "SpectrogramDiffusion"),
    "makes no images of texts": (
        *("ConsistencyModel", "DDIM", "DDPM", "DiT", "KarrasVe", "LDM", "PNDM", "ScoreSdeVe", "ShapE"),
        *("StableDiffusionLDM3D", "DiffusionGemma", "LLaDA2", r"Marigold\w+", "RFD4Proteina"),
    ),
    "the modular form of a plain pipeline": (
        "(ErnieImage|Flux|Flux2|Flux2Klein|Flux2KleinBase|Ideogram4|Krea2|Krea2Turbo|QwenImage|QwenImage21|ZImage)Modular",
        "StableDiffusion(3|XL)Modular",
    ),
    "distilled to a few steps, which plain training undoes": (
        *("LatentConsistencyModel", "SanaSprint", "Flux3DistilledModular", "QwenImage21TurboModular"),
    ),
    "an older model, for which no family is planned": (
        *("AltDiffusion", "Amused", "IF", "Kandinsky3", "Kandinsky(V22)?(Prior|PriorEmb2Emb|Combined)?", "LDMTextToImage"),
        *(r"StableCascade\w+", "StableUnCLIP", "UnCLIP", "UniDiffuser", "VQDiffusion", r"VersatileDiffusion\w*"),
        r"Wuerstchen\w+",
    ),
    "nobody has written its family yet": (
        *("BriaFibo2?", "CogView3Plus", "CogView4"),
        *("DreamLite(Mobile)?", "Flux3Modular", "GlmImage", "HunyuanDiT", "HunyuanImage"),
        *("Kandinsky5T2I", "Kolors", "Lumina", "NucleusMoEImage", "OmniGen"),
        "PRX(Pixel)?",
    ),
}
"""By the reason, patterns of the names of classes without "Pipeline"."""


def others() -> set[str]:
    """The published classes that no family trains."""
    published = {name.removesuffix("Pipeline") for name in dir(diffusers) if name.endswith("Pipeline")}
    return published - {name.removesuffix("Pipeline") for family in FAMILIES for name in pipelines(family.name)}


def test_each_published_pipeline_is_trained_or_left_out_for_a_reason():
    known = re.compile("|".join(pattern for patterns in LEFT_OUT.values() for pattern in patterns))
    assert sorted(name for name in others() if not known.fullmatch(name)) == []


def test_nothing_is_said_to_be_left_out_that_is_trained_or_not_there():
    left = others()
    said = [pattern for patterns in LEFT_OUT.values() for pattern in patterns]
    assert [pattern for pattern in said if not any(re.fullmatch(pattern, name) for name in left)] == []
