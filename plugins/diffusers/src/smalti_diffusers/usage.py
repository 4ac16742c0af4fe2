"""What to do with an export: lines to paste for diffusers and peft, and where files go in ComfyUI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti.checkpoint import Usage
from smalti_diffusers.lora.formats import TOOLS, Format
from smalti_diffusers.sources.single_file import FILE_LAYOUTS

if TYPE_CHECKING:
    from smalti_diffusers.pipeline import PipelineFamily

_GENERATE = 'pipeline({prompt}).images[0].save("image.png")'
_GENERATE_MODULAR = 'pipeline(prompt={prompt}, output="images")[0].save("image.png")'
_FORGE = {"flux": "Forge", "sdxl": "Forge, A1111"}
"""Interfaces that read kohya's format, by family."""
_TIMED = "# a T-LoRA: used with all its ranks at every noise level, so try strengths below 1"


def _noted(family: PipelineFamily, found: list[Usage]) -> list[Usage]:
    """With what a user has to set after a run that left out layers of the text encoder."""
    skipped = family.options.clip_skip
    notes = {
        "ComfyUI": f"with the node CLIP Set Last Layer at {-1 - skipped}",
        "diffusers": f"# with clip_skip={skipped} in the call, for which transformers 4 is needed",
    }
    return [
        Usage(tool=each.tool, text=f"{each.text}\n{notes[each.tool.split()[0]]}", needs_run=each.needs_run)
        if skipped and not each.needs_run
        else each
        for each in found
    ]


def pipeline_usages(family: PipelineFamily) -> list[Usage]:
    """Of a complete pipeline."""
    lines = [*_imports(family), *_loaded(family, '"{path}"'), _generate(family)]
    found = [Usage(tool="diffusers", text="\n".join(lines))]
    if family.name in FILE_LAYOUTS:
        found.append(Usage(tool="ComfyUI", text="export again with --single_file", needs_run=True))
    return _noted(family, found)


def single_file_usages(family: PipelineFamily, name: str) -> list[Usage]:
    """Of a model in one file."""
    folder = "checkpoints" if FILE_LAYOUTS[family.name].vae is not None else "diffusion_models"
    return _noted(family, [Usage(tool="ComfyUI", text=f"cp {{path}}/{name}.safetensors ComfyUI/models/{folder}/")])


def adapter_usages(family: PipelineFamily, format: Format, name: str) -> list[Usage]:
    """Of an adapter in this format."""
    tools = TOOLS.get(family.name)
    comfyui = tools.comfyui if tools is not None else None
    found = []
    if format == "diffusers":
        lines = [*_imports(family), *_base(family), 'pipeline.load_lora_weights("{path}")', _generate(family)]
        found.append(Usage(tool="diffusers", text="\n".join(lines)))
    elif format == "peft":
        part = f"pipeline.{family.part}"
        wrapped = f'{part} = PeftModel.from_pretrained({part}, "{{path}}").merge_and_unload()'
        lines = [*_imports(family), "from peft import PeftModel", *_base(family), wrapped, _generate(family)]
        found.append(Usage(tool="diffusers and peft", text="\n".join(lines)))
    if format in ("comfyui", "kohya") and (format == "comfyui" or comfyui == "kohya"):
        node = "LoraLoader, with both strengths 1.0" if family.encoders else "LoraLoaderModelOnly, strength 1.0"
        copied = f"cp {{path}}/{name}.safetensors ComfyUI/models/loras/\nchoose it in the node {node}"
        found.append(Usage(tool="ComfyUI", text=copied))
    elif comfyui is not None:
        found.append(Usage(tool="ComfyUI", text="export again with --format=comfyui", needs_run=True))
    if format == "kohya" and family.name in _FORGE:
        found.append(Usage(tool=_FORGE[family.name], text=f"cp {{path}}/{name}.safetensors models/Lora/"))
    if family.lora is not None and family.lora.least is not None:
        found = [Usage(tool=each.tool, text=f"{each.text}\n{_TIMED}", needs_run=each.needs_run) for each in found]
    return _noted(family, found)


def _base(family: PipelineFamily) -> list[str]:
    """Lines that load the pipeline that the adapter was trained on."""
    source, base = family.source, family.base_source
    if base is None:
        return _loaded(family, f'"{source}"')
    kind = family.components.kind(family.part)
    return [
        f"from diffusers import {kind}",
        f'{family.part} = {kind}.from_single_file("{source}", config="{base}", subfolder="{family.part}")'
        if source.endswith(".safetensors")
        else f'{family.part} = {kind}.from_pretrained("{source}")',
        *_loaded(family, f'"{base}"', f"{family.part}={family.part}"),
    ]


def _imports(family: PipelineFamily) -> list[str]:
    return [
        "import torch",
        f"from diffusers import {'ModularPipeline' if family.components.is_modular else 'DiffusionPipeline'}",
    ]


def _loaded(family: PipelineFamily, *arguments: str) -> list[str]:
    """Lines that load the pipeline of this name, with other parts in the place of its own."""
    if not family.components.is_modular:
        given = ", ".join(arguments)
        return [f'pipeline = DiffusionPipeline.from_pretrained({given}, dtype=torch.bfloat16).to("cuda")']
    source, *parts = arguments
    lines = [f"pipeline = ModularPipeline.from_pretrained({source})", "pipeline.load_components(dtype=torch.bfloat16)"]
    lines += [f"pipeline.update_components({each})" for each in parts]
    return [*lines, 'pipeline = pipeline.to("cuda")']


def _generate(family: PipelineFamily) -> str:
    return _GENERATE_MODULAR if family.components.is_modular else _GENERATE
