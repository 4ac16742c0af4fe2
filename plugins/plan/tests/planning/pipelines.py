"""Small Flux, SDXL and SD3 pipelines: those of the tests, with models of two to four million parameters."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_TINY = Path(__file__).parents[3] / "diffusers/tests"
_FLUX = {"num_single_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4, "axes_dims_rope": (8, 12, 12)}
_SD3 = {"num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4, "caption_projection_dim": 128}
_SDXL = {"block_out_channels": (48, 96), "attention_head_dim": (3, 6), "norm_num_groups": 16}
PIPELINES = (
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
)
"""Modules that families import, which take seconds."""
LARGER: dict[str, tuple[str, str, dict[str, object]]] = {
    "flux": ("transformer", "FluxTransformer2DModel", _FLUX),
    "sd3": ("transformer", "SD3Transformer2DModel", _SD3 | {"pos_embed_max_size": 64, "sample_size": 64}),
    "sdxl": ("unet", "UNet2DConditionModel", _SDXL),
}


def pipeline(family: str, folder: Path) -> Path:
    """A pipeline of a family in diffusers' layout, with random weights; of other families than those three at its tiniest."""
    sys.path.insert(0, str(_TINY))
    made = Path(getattr(import_module("tiny"), family)(folder))
    if family not in LARGER:
        return made
    part, name, changes = LARGER[family]
    config = json.loads((made / part / "config.json").read_text())
    model: Any = getattr(import_module("diffusers"), name)
    torch.manual_seed(0)
    model.from_config(config | changes).save_pretrained(made / part)
    return made


def published_flux(folder: Path) -> Path:
    """FLUX.1 dev's transformer of 12 billion parameters, described and without weights; all else is tiny."""
    made = pipeline("flux", folder)
    config = made / "transformer" / "config.json"
    own, published = json.loads(config.read_text()), import_module("published").FLUX_DEV
    config.write_text(json.dumps(published | {"in_channels": own["in_channels"]}))
    for weights in (made / "transformer").glob("*.safetensors"):
        weights.unlink()
    return made
