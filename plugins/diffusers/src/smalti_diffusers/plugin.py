"""What smalti asks of this package. Imports no torch until a family is chosen."""

from __future__ import annotations

from smalti import Config, FamilyEntry, OptionGroup, Problem, hookimpl
from smalti_diffusers.options import GROUPS

FAMILIES = (
    FamilyEntry(name="auraflow", title="AuraFlow", factory="smalti_diffusers.auraflow:family"),
    FamilyEntry(name="flux", title="Flux.1", factory="smalti_diffusers.flux:family"),
    FamilyEntry(name="flux2", title="Flux.2", factory="smalti_diffusers.flux2:family"),
    FamilyEntry(name="lumina2", title="Lumina Image 2.0", factory="smalti_diffusers.lumina2:family"),
    FamilyEntry(name="pixart", title="PixArt Sigma and Alpha", factory="smalti_diffusers.pixart:family"),
    FamilyEntry(name="qwen_image", title="Qwen-Image", factory="smalti_diffusers.qwen_image:family"),
    FamilyEntry(name="sana", title="Sana", factory="smalti_diffusers.sana:family"),
    FamilyEntry(name="sd3", title="Stable Diffusion 3 and 3.5", factory="smalti_diffusers.sd3:family"),
    FamilyEntry(name="sdxl", title="Stable Diffusion XL", factory="smalti_diffusers.sdxl:family"),
    FamilyEntry(name="z_image", title="Z-Image", factory="smalti_diffusers.z_image:family"),
)


class Diffusers:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return list(GROUPS)

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_diffusers.checks import problems

        return problems(config)

    @hookimpl
    def register_model_families(self) -> list[FamilyEntry]:
        return list(FAMILIES)


plugin = Diffusers()
