"""Which tools read the file of an adapter, and at which strength. Facts of 2026."""

from __future__ import annotations

from smalti import UserError
from smalti_diffusers.lora.formats import TOOLS, Tools, chosen_format
from smalti_diffusers.lora.header import AdapterHeader

_STYLES = {
    "base_model.model.": "peft",
    "transformer.": "diffusers",
    "unet.": "diffusers",
    "diffusion_model.": "comfyui",
    "lora_unet_": "kohya",
    "lora_transformer_": "onetrainer",
    "lycoris_": "lycoris",
}
"""How names of layers begin -> whose names they are."""
_KOHYA_IN_DIFFUSERS = ("flux", "flux2", "qwen_image", "sd1x", "sd2x", "sdxl", "z_image")
"""Families of which diffusers converts LoRAs with kohya's names."""
_NOBODYS = Tools(diffusers=False, comfyui=None, kohya=False)


def readers(header: AdapterHeader, family: str) -> dict[str, str]:
    """What each tool makes of the file: "reads it", at another strength if so, or "does not read it"."""
    tools = TOOLS.get(family, _NOBODYS)
    first = next(iter(header.layers))
    style = next((style for start, style in _STYLES.items() if first.startswith(start)), "peft")
    in_comfyui = {"diffusers": {"diffusers", "comfyui"}, "kohya": {"kohya"}, None: set[str]()}[tools.comfyui]
    if tools.original and tools.comfyui is not None:
        in_comfyui = in_comfyui | {"kohya"}
    if style == "kohya":
        in_diffusers = header.kind == "lora" and family in _KOHYA_IN_DIFFUSERS
    else:
        in_diffusers = style == "diffusers" and chosen_format(family, None, header.kind) == "diffusers"
    in_peft = style == "peft" and header.path.with_name("adapter_config.json").is_file()
    formats = {
        "diffusers": ("diffusers", in_diffusers),
        "ComfyUI": ("comfyui", style in in_comfyui),
        "kohya": ("kohya", style == "kohya" and tools.kohya),
        "peft": ("peft", in_peft),
    }
    found = {tool: "reads it" if reads else _instead(header, family, format) for tool, (format, reads) in formats.items()}
    return found | ({"ComfyUI": _read_by_comfyui(header)} if style in in_comfyui else {})


def _instead(header: AdapterHeader, family: str, format: str) -> str:
    try:
        chosen_format(family, format, header.kind)
    except UserError as error:
        return f"does not read it: {error.message}"
    return f"does not read it: smalti adapter convert --format={format}"


def _read_by_comfyui(header: AdapterHeader) -> str:
    """ComfyUI takes alpha from tensors alone, and lengths to be over the norms of the base."""
    if header.kind == "dora" and not header.lengths_of_base:
        return "reads it, but takes lengths for those over the norms of the base: not exact"
    strengths = {round(1 / header.scale(name), 4) for name, layer in header.layers.items() if layer.scale is None}
    wrong = sorted(strengths - {1.0})
    return f"reads it at {wrong[0]:g} times the strength: smalti adapter convert --format=comfyui" if wrong else "reads it"
