"""The kinds of pipelines that are tried, and how each is called otherwise than by its defaults."""

import json

import tiny
import torch
from diffusers import DiffusionPipeline
from tiny_parts import vision_processor
from transformers import AutoTokenizer

from smalti_diffusers.families.tokens import FLAT, pack

MAKERS = {
    "flux": ("flux", tiny.flux, {}),
    "flux schnell": ("flux", tiny.flux, {"guidance": False}),
    "chroma": ("chroma", tiny.chroma, {}),
    "bria": ("bria", tiny.bria, {}),
    "ernie": ("ernie", tiny.ernie, {}),
    "flux2 klein": ("flux2", tiny.flux2, {}),
    "flux2 klein distilled": ("flux2", tiny.flux2, {"distilled": True}),
    "flux2 dev": ("flux2", tiny.flux2, {"dev": True}),
    "sd3": ("sd3", tiny.sd3, {}),
    "sd3.5": ("sd3", tiny.sd3, {"newer": True}),
    "pixart sigma": ("pixart", tiny.pixart, {}),
    "pixart alpha": ("pixart", tiny.pixart, {"alpha": True}),
    "sana": ("sana", tiny.sana, {}),
    "auraflow": ("auraflow", tiny.auraflow, {}),
    "hidream": ("hidream", tiny.hidream, {}),
    "ideogram": ("ideogram", tiny.ideogram, {}),
    "krea2": ("krea2", tiny.krea2, {}),
    "krea2 turbo": ("krea2", tiny.krea2, {"distilled": True}),
    "longcat image": ("longcat_image", tiny.longcat_image, {}),
    "lumina2": ("lumina2", tiny.lumina2, {}),
    "ovis image": ("ovis_image", tiny.ovis_image, {}),
    "qwen image": ("qwen_image", tiny.qwen_image, {}),
    "qwen image 2.1": ("qwen_image21", tiny.qwen_image21, {}),
    "qwen image 2.1 sigmas": ("qwen_image21", tiny.qwen_image21, {"sigmas": [1.0, 0.6]}),
    "z image": ("z_image", tiny.z_image, {}),
}
# Whose model is no transformer too, modular pipelines, and one that counts noise otherwise.
EVERY = MAKERS | {
    "hidream small": ("hidream", tiny.hidream, {"edge": 8}),
    "hidream dev": ("hidream", tiny.hidream, {"distilled": True}),
    "hidream some layers": ("hidream", tiny.hidream, {"layers": (0, 2)}),
    "anima": ("anima", tiny.anima, {}),
    "cosmos": ("cosmos", tiny.cosmos, {}),
    "sd1x": ("sd1x", tiny.sd1x, {}),
    "sd2x": ("sd2x", tiny.sd2x, {}),
    "sdxl": ("sdxl", tiny.sdxl, {}),
    "sdxl encoded": ("sdxl", tiny.sdxl, {"force_zeros": False}),
}
MODULAR = ("anima",)
"""Modular pipelines, which are called otherwise than the others: `test_modular_families`."""
PROMPTS = ["A red fox in the snow", "two boats"]
EMPTY = [""] * len(PROMPTS)
SIZE = (96, 64)
GUIDANCE = 3.5
# What pipelines take as latents, where that is not what smalti calls so.
PACKED = ("flux", "bria", "chroma", "krea2", "longcat_image", "ovis_image", "qwen_image")
GIVEN = {"ideogram": FLAT.pack, "qwen_image21": FLAT.pack, **dict.fromkeys(PACKED, pack)}
# What a run says to the pipeline where the pipeline's own default would be another one.
TOLD = {
    "flux schnell": {"max_sequence_length": 256},
    "pixart sigma": {"use_resolution_binning": False, "clean_caption": False},
    "pixart alpha": {"use_resolution_binning": False, "clean_caption": False},
    "sana": {"use_resolution_binning": False},
    "ideogram": {"guidance_schedule": None, "max_sequence_length": 64},
    "krea2": {"guidance_scale": GUIDANCE - 1},
    "krea2 turbo": {"guidance_scale": GUIDANCE - 1},
    "longcat image": {"negative_prompt": EMPTY, "enable_prompt_rewrite": False},
    "qwen image": {"true_cfg_scale": GUIDANCE, "negative_prompt": [" "] * len(PROMPTS)},
    "qwen image 2.1": {"true_cfg_scale": GUIDANCE, "negative_prompt": EMPTY},
    "qwen image 2.1 sigmas": {"true_cfg_scale": GUIDANCE, "negative_prompt": EMPTY},
    "z image": {"guidance_scale": GUIDANCE - 1},
    "cosmos": {"negative_prompt": EMPTY},
}


def opened(folder, size=SIZE):
    """The pipeline in a folder, as it is made here: Cosmos without its guardrail, LongCat-Image without what rewrites prompts,
    Qwen-Image 2.1 without a processor of videos.

    That of HiDream-I1 makes images of as many pixels as `size`, in place of a megapixel.
    """
    kind, more = json.loads((folder / "model_index.json").read_text())["_class_name"], {}
    if kind == "Cosmos2TextToImagePipeline":
        more = {"safety_checker": tiny.NoGuardrail()}
    elif kind == "LongCatImagePipeline":
        more = {"text_processor": None}
    elif kind == "QwenImage21Pipeline":
        more = {"processor": vision_processor(AutoTokenizer.from_pretrained(folder / "processor"))}
    pipeline = DiffusionPipeline.from_pretrained(folder, **more)
    if kind == "HiDreamImagePipeline":
        pipeline.default_sample_size = (size[0] * size[1]) ** 0.5 / pipeline.vae_scale_factor + 1e-6
    return masked(pipeline)


def call(pipeline, *, together=False, **given):
    """Images by the pipeline. That of Qwen-Image 2.1 has no `guidance_scale`, and its images are laid over white.

    It is called for each prompt, if not for all `together`: where an image is depends on the longest of them.
    """
    if type(pipeline).__name__ != "QwenImage21Pipeline":
        return pipeline(**given).images
    given.pop("guidance_scale", None)
    if not together:
        names = [name for name in ("prompt", "negative_prompt", "latents", "generator") if name in given]
        rows = [{name: given[name][row : row + 1] for name in names} for row in range(len(given["prompt"]))]
        return torch.cat([call(pipeline, together=True, **{**given, **row}) for row in rows])
    images = pipeline(**given).images
    if given["output_type"] == "latent":
        return images
    return torch.lerp(torch.ones(3, 1, 1), images[:, :3], images[:, 3:])


def masked(pipeline):
    """The pipeline; that of Chroma with masks that mask: attention adds numbers to its scores (diffusers, issue 13619)."""
    if type(pipeline).__name__ == "ChromaPipeline":
        encode = pipeline.encode_prompt

        def with_booleans(*given, **named):
            found = enumerate(encode(*given, **named))
            return tuple(each.bool() if number in (2, 5) and each is not None else each for number, each in found)

        pipeline.encode_prompt = with_booleans
    return pipeline
