"""What smalti asks of this package. Imports no torch until a family is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CommandCollector, FamilyEntry, PeriodicEntry, hookimpl
from smalti_diffusers.flavours import FLAVOURS, GATED

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem


def _entry(name: str, title: str, cls: str) -> FamilyEntry:
    factory = f"smalti_diffusers.families.{name}:{cls}.create"
    flavours = FLAVOURS[name]
    gated = GATED.intersection(flavours.values())
    return FamilyEntry(name=name, title=title, factory=factory, flavours=flavours, gated=gated, downloads=True)


FAMILIES = (
    _entry("anima", "Anima", "Anima"),
    _entry("auraflow", "AuraFlow", "AuraFlow"),
    _entry("bria", "Bria 3.2", "Bria"),
    _entry("chroma", "Chroma", "Chroma"),
    _entry("cosmos", "Cosmos-Predict2", "Cosmos"),
    _entry("ernie", "ERNIE-Image", "Ernie"),
    _entry("flux", "Flux.1", "Flux"),
    _entry("flux2", "Flux.2", "Flux2"),
    _entry("hidream", "HiDream-I1", "HiDream"),
    _entry("ideogram", "Ideogram 4", "Ideogram"),
    _entry("krea2", "Krea 2", "Krea2"),
    _entry("longcat_image", "LongCat-Image", "LongCatImage"),
    _entry("lumina2", "Lumina Image 2.0", "Lumina2"),
    _entry("ovis_image", "Ovis-Image", "OvisImage"),
    _entry("pixart", "PixArt Sigma and Alpha", "PixArt"),
    _entry("qwen_image", "Qwen-Image", "QwenImage"),
    _entry("qwen_image21", "Qwen-Image 2.1", "QwenImage21"),
    _entry("sana", "Sana", "Sana"),
    _entry("sd1x", "Stable Diffusion 1", "StableDiffusion1"),
    _entry("sd2x", "Stable Diffusion 2", "StableDiffusion2"),
    _entry("sd3", "Stable Diffusion 3 and 3.5", "StableDiffusion3"),
    _entry("sdxl", "Stable Diffusion XL", "Sdxl"),
    _entry("z_image", "Z-Image", "ZImage"),
)


ENCODER_STOP = PeriodicEntry(
    name="encoder_stop", title="stop of the text encoders", factory="smalti_diffusers.lora.encoder_stop:encoder_stop_of"
)


class Diffusers:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_diffusers.options import GROUPS

        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_diffusers.checks import problems

        return problems(config)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_diffusers.adapter_command:adapter", "Check, convert, merge and resize files of adapters.")

    @hookimpl
    def register_model_families(self) -> list[FamilyEntry]:
        return list(FAMILIES)

    @hookimpl
    def register_periodic_work(self) -> list[PeriodicEntry]:
        return [ENCODER_STOP]


plugin = Diffusers()
