"""SimpleTuner's names of models and of sets of layers, for the families that are here too."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.rules import is_empty, plain

FLAVOURS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "anima": dict.fromkeys(("release", "base-v1.0"), ("base-1.0", "")),
    "auraflow": {"v0.1": ("0.1", ""), "v0.2": ("0.2", ""), "v0.3": ("0.3", "")},
    "chroma": {"base": ("", "lodestones/Chroma1-Base"), "flash": ("", "lodestones/Chroma1-Flash")},
    "ernie": {"turbo": ("", "baidu/ERNIE-Image-Turbo")},
    "flux": {
        "krea": ("", "black-forest-labs/FLUX.1-Krea-dev"),
        "fluxbooru": ("", "terminusresearch/fluxbooru-v0.3"),
        "libreflux": ("", "jimmycarter/LibreFlux-SimpleTuner"),
    },
    "lumina2": {"neta-lumina": ("", "terminusresearch/neta-lumina-v1")},
    "pixart": {
        "600m-1024": ("sigma-1024", ""),
        "600m-512": ("", "PixArt-alpha/PixArt-Sigma-XL-2-512-MS"),
        "600m-2048": ("", "PixArt-alpha/PixArt-Sigma-XL-2-2K-MS"),
        "900m-1024-v0.6": ("", "terminusresearch/pixart-900m-1024-ft-v0.6"),
    },
    "qwen_image": {"v1.0": ("image", "")},
    "sana": {
        "sana1.5-4.8b-1024": ("", "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers"),
        "sana1.5-1.6b-1024": ("", "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers"),
        "sana1.0-1.6b-2048": ("", "Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers"),
        "sana1.0-1.6b-1024": ("1600m-1024", ""),
        "sana1.0-600m-1024": ("600m-1024", ""),
        "sana1.0-600m-512": ("600m-512", ""),
    },
    "sd1x": {"1.4": ("", "CompVis/stable-diffusion-v1-4"), "dreamshaper": ("", "Lykon/dreamshaper-8")},
    "sd2x": {
        "digitaldiffusion": ("", "Junglerally/Digital-Diffusion"),
        "pseudoflex-v2": ("", "bghira/pseudo-flex-v2"),
        "pseudojourney": ("", "bghira/pseudo-journey-v2"),
    },
    "sd3": {"large": ("3.5-large", "")},
    "sdxl": {"base-0.9": ("", "stabilityai/stable-diffusion-xl-base-0.9")},
}
"""By family, the flavour here; or an empty text and the hub id of its weights, for models without a flavour here."""

OTHER_TASKS: Mapping[str, Mapping[str, str]] = {
    "anima": dict.fromkeys(("preview", "preview-2", "preview-3"), "a preview of Anima, in another layout than base-1.0,"),
    "flux": {"kontext": "image editing"},
    "longcat_image": {"edit": "image editing"},
    "qwen_image": dict.fromkeys(("edit-v1", "edit-v2", "edit-v2+", "edit-v3"), "image editing"),
    "sdxl": dict.fromkeys(("refiner-1.0", "refiner-0.9"), "the SDXL refiner"),
    "pixart": dict.fromkeys(("900m-1024-v0.7-stage1", "900m-1024-v0.7-stage2"), "a model in two stages"),
}
"""Flavours that are trained in another way, which is not supported."""

OTHER_MODELS: Mapping[tuple[str, str], str] = {
    ("flux2", "klein-4b"): "klein-base-4b",
    ("flux2", "klein-9b"): "klein-base-9b",
    ("sd3", "medium"): "3.5-medium",
}
"""Flavours that name another model in SimpleTuner's files than here."""

BASE_MODELS: Mapping[str, str] = {
    "chroma": "lodestones/Chroma1-Base",
    "anima": "circlestone-labs/Anima-Base-v1.0-Diffusers",
    "flux": "black-forest-labs/FLUX.1-Krea-dev",
    "flux2": "black-forest-labs/FLUX.2-klein-base-9B",
    "pixart": "terminusresearch/pixart-900m-1024-ft-v0.6",
    "pixart_sigma": "terminusresearch/pixart-900m-1024-ft-v0.6",
    "sana": "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
    "sd1x": "Lykon/dreamshaper-8",
    "sd2x": "bghira/pseudo-flex-v2",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
}
"""What SimpleTuner trains if neither a model nor a flavour is given, for families whose default here is another model.

Of Anima that is preview-3, in a layout of its own: the released model is in its place.
"""

_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_CONTEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_CONTEXT_FEED_FORWARD = ("ff_context.net.0.proj", "ff_context.net.2")

FLUX_LORA_TARGETS: Mapping[str, tuple[str, ...]] = {
    "mmdit": _ATTENTION,
    "context": _CONTEXT,
    "context+ffs": (*_CONTEXT, *_CONTEXT_FEED_FORWARD),
    "all": (*_ATTENTION, *_CONTEXT),
    "all+ffs": (*_ATTENTION, *_CONTEXT, "ff.net.0.proj", "ff.net.2", *_CONTEXT_FEED_FORWARD, "proj_mlp", "proj_out"),
}
"""Layers that are adapted, by the value of flux_lora_target."""

LORA_TARGETS: Mapping[str, tuple[str, ...]] = {
    "": _ATTENTION,
    "flux": FLUX_LORA_TARGETS["all"],
    "hidream": ("to_k", "to_q", "to_v"),  # there is no to_out.0 among its layers, which peft passes over
    "flux2": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
}
"""Layers that are adapted by default, by family; "" is for all others."""


def flavour(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`model_flavour` by the names here. Raises ValueError for models that are trained in another way."""
    family = str(plain(values.get("model_family"))).replace("-", "_").removesuffix("_sigma")
    name = str(value).strip().lower()
    if (task := OTHER_TASKS.get(family, {}).get(name)) is not None:
        raise ValueError(f"{task} is not supported")
    other, path = FLAVOURS.get(family, {}).get(name, (value, ""))
    if not path:
        return {"model_flavour": other}
    return {"pretrained_model_name_or_path": path} if is_empty(values.get("pretrained_model_name_or_path")) else {}


def flux_targets(value: object, _values: Mapping[str, object]) -> Mapping[str, object]:
    """`flux_lora_target` as the names of layers."""
    name = str(value).strip().lower()
    if name not in FLUX_LORA_TARGETS:
        raise ValueError(f"this set of layers has no name here; known are {', '.join(FLUX_LORA_TARGETS)}")
    return {"lora_targets": list(FLUX_LORA_TARGETS[name])}
