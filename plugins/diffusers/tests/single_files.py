"""Pipelines in diffusers' layout as the single files that people have: names of the original, of ComfyUI, or of diffusers."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.layouts import LAYOUTS, OPEN_CLIP
from smalti_diffusers.sources.single_file import file_tensors

UNET = "model.diffusion_model."
ENCODERS = {
    ("sd1x", "text_encoder"): ("cond_stage_model.transformer.", {}),
    ("sdxl", "text_encoder"): ("conditioner.embedders.0.transformer.", {}),
    ("sdxl", "text_encoder_2"): ("conditioner.embedders.1.model.", OPEN_CLIP),
    ("sd3", "text_encoder"): ("text_encoders.clip_l.transformer.", {}),
    ("sd3", "text_encoder_2"): ("text_encoders.clip_g.transformer.", {}),
    ("sd3", "text_encoder_3"): ("text_encoders.t5xxl.transformer.", {}),
    ("flux", "text_encoder"): ("text_encoders.clip_l.transformer.", {}),
    ("flux", "text_encoder_2"): ("text_encoders.t5xxl.transformer.", {}),
}
"""Where files of a family have a text encoder: prefix, and table of names."""


def renamed(components: Components, part: str) -> dict[str, torch.Tensor]:
    """The weights of a model under the names that its own tools have."""
    weights = components.weights(part)
    table = LAYOUTS[components.kind(part)](components.config(part))
    return {each.name: each.make(weights.get).contiguous() for each in file_tensors(weights.names(), table)}


def encoder(components: Components, part: str, table) -> dict[str, torch.Tensor]:
    """A text encoder under the names of CLIP's checkpoints, which have a layer that transformers left out."""
    weights = components.weights(part)
    names = {name: name for name in weights.names()}
    if components.kind(part) == "CLIPTextModel" and not any(name.startswith("text_model.") for name in names):
        names = {f"text_model.{name}": name for name in names}
    return {each.name: each.make(lambda name: weights.get(names[name])).contiguous() for each in file_tensors(names, table)}


def single_file(
    base: Path, target: Path, family: str, *, part="transformer", prefix="", vae="", encoders=(), dtype=None, more=None
) -> Path:
    """A file of this pipeline's trained part under `prefix`, its autoencoder under `vae`, and some of its text encoders."""
    components = Components(base)
    found = {prefix + name: tensor for name, tensor in renamed(components, part).items()}
    if vae:
        found |= {vae + name: tensor for name, tensor in renamed(components, "vae").items()}
    for name in encoders:
        place, table = ENCODERS[family, name]
        found |= {place + key: tensor for key, tensor in encoder(components, name, table).items()}
    if dtype is not None:
        found = {name: tensor.to(dtype) for name, tensor in found.items()}
    save_file(found | (more or {}), target)
    return target
