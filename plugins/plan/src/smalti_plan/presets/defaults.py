"""What to train with, apart from what the memory decides: rates, lengths, ranks, each with the source of the value.

The sources are configurations that others publish for the same kind of run: the examples of ai-toolkit
(`config/examples/train_lora_flux_24gb.yaml`, `train_full_fine_tune_flex.yaml`), diffusers' DreamBooth scripts and their
READMEs, and the presets of OneTrainer (`training_presets`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from smalti.config import Schema
from smalti_plan.presets.request import Request

_PER_IMAGE = 100
_LEAST, _MOST = 1000, 4000
"""Images seen in a whole run on a small folder: ai-toolkit calls 500 to 4000 steps of one image a good range."""
_EPOCHS = 10
"""Passes over a folder that is so large that `_MOST` images would be fewer."""
_LARGE = 500
"""Images of a folder for which a LoRA is trained with more than one image in a step."""
_SAVED = 250
"""Steps between two checkpoints, and validation images: ai-toolkit's example."""
_TOOLKIT = "https://github.com/ostris/ai-toolkit/blob/main/config/examples"
_DREAMBOOTH = "https://github.com/huggingface/diffusers/blob/main/examples/dreambooth"
_LORA_SOURCES = {
    "chroma": f"{_TOOLKIT}/train_lora_chroma_24gb.yaml",
    "flux": f"{_TOOLKIT}/train_lora_flux_24gb.yaml",
    "ideogram": f"{_DREAMBOOTH}/README_ideogram4.md",
    "lumina2": f"{_TOOLKIT}/train_lora_lumina.yaml",
    "qwen_image": f"{_TOOLKIT}/train_lora_qwen_image_24gb.yaml",
    "sd3": f"{_TOOLKIT}/train_lora_sd35_large_24gb.yaml",
}
"""Published configurations of a LoRA of the same family, one image in a step: all have the rate 1e-4 and the rank 16."""
_LORA_RATES = {"sdxl": f"{_DREAMBOOTH}/README_sdxl.md"}
"""Published configurations with this rate and another rank or none."""
_LONGCAT = "https://github.com/meituan-longcat/LongCat-Image/blob/main/train_examples"
_LORA_OTHERS = {
    "hidream": (2e-4, 8, f"{_DREAMBOOTH}/README_hidream.md"),
    "krea2": (3e-4, 32, f"{_DREAMBOOTH}/README_krea2.md"),
    "longcat_image": (1e-4, 32, f"{_LONGCAT}/lora/train_config.yaml"),
}
"""Published configurations with another rate and rank."""
_NOISE_LEVELS = {"ideogram": (1.5, f"{_DREAMBOOTH}/train_dreambooth_lora_ideogram4.py, as the pipeline's own schedule")}
"""Deviations of the normal distribution behind the noise levels, where a published configuration has another than 1."""
_FULL_RATES = {
    "longcat_image": (1e-5, f"{_LONGCAT}/sft/train_config.yaml"),
    "sdxl": (3e-6, "OneTrainer's preset for SDXL in full"),
}
_FULL_RATE = (1e-5, "OneTrainer's presets for Qwen-Image in full; ai-toolkit has 3e-5 with Adafactor")
_BYTES_OF_STATE = 12
"""Of a checkpoint, for each parameter that trains: weight and two moments of AdamW in fp32."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A value of the file, and why it is that; "" where the name of the option says it all."""

    value: object
    why: str = ""


Sections = Mapping[str, Mapping[str, Line]]
"""Lines by option, under the titles of their sections."""


def effective_batch(request: Request) -> int:
    """Images per optimizer step: one for each GPU at least, and the same number for each of them."""
    wanted = 8 if request.goal == "full" else 4 if request.images > _LARGE else 1
    return math.ceil(wanted / request.gpus) * request.gpus


def seen_images(request: Request) -> tuple[int, str]:
    """How many images a run should see in all, repeats included, and why."""
    seen = min(max(request.images * _PER_IMAGE, _LEAST), _MOST)
    if request.images * _EPOCHS > seen:
        return request.images * _EPOCHS, f"{_EPOCHS} passes over {request.images} images"
    if request.images * _PER_IMAGE == seen:
        return seen, f"{_PER_IMAGE} for each of {request.images} images"
    return seen, f"{seen / request.images:.0f} for each of {request.images} images; ai-toolkit: 500 to {_MOST} is a good range"


def resolutions(request: Request) -> tuple[int, ...]:
    """Edges of the training images in pixels, the model's own first."""
    return tuple(each for each in (1024, 768, 512) if each == 512 or "512" not in request.weights)


def model_lines(request: Request) -> Iterator[tuple[str, Line]]:
    yield "model_type", Line(value=request.goal)
    yield "model_family", Line(value=request.entry.name, why=request.entry.title)
    if request.weights:
        why = "a Hub id; or your own folder or .safetensors file of the same model"
        if request.is_gated:
            why = f"gated: accept its terms at https://huggingface.co/{request.weights}, then `hf auth login`"
        yield "pretrained_model_name_or_path", Line(value=request.weights, why=why)


def data_lines(request: Request, resolution: int) -> Iterator[tuple[str, Line]]:
    there = f"{request.images} images" if request.counted else f"CHANGE THIS: your folder; planned for {request.images} images"
    yield "instance_data_dir", Line(value=str(request.data), why=there)
    if request.prompt:
        yield "caption_strategy", Line(value="instanceprompt", why="one caption for all images")
        yield "instance_prompt", Line(value=request.prompt, why="with a word that the model does not know")
    else:
        yield "caption_strategy", Line(value="textfile", why="the caption of NAME.jpg is in NAME.txt")
    why = "edge of a square of this area; images keep their aspect ratio"
    if resolution != (own := resolutions(request)[0]):
        why = f"{own} is the model's own, and does not fit; {why}"
    yield "resolution", Line(value=resolution, why=why)


def training_lines(request: Request) -> Iterator[tuple[str, Line]]:
    batch = effective_batch(request)
    seen, why = seen_images(request)
    steps = math.ceil(seen / batch)
    if request.entry.name in _NOISE_LEVELS:
        deviation, source = _NOISE_LEVELS[request.entry.name]
        yield "flow_sigmoid_scale", Line(value=deviation, why=source)
    yield "max_train_steps", Line(value=steps, why=f"{why}, {batch} in a step" if batch > 1 else f"steps of one image, {why}")
    if request.goal == "lora":
        source = _LORA_SOURCES.get(request.entry.name, f"as for FLUX.1: {_LORA_SOURCES['flux']}")
        rate, rank, source = _LORA_OTHERS.get(request.entry.name, (1e-4, 16, source))
        yield "learning_rate", Line(value=rate, why=_LORA_RATES.get(request.entry.name, source))
        yield "lora_rank", Line(value=rank, why=f"{source}; more for a style with much detail")
        return
    rate, source = _FULL_RATES.get(request.entry.name, _FULL_RATE)
    yield "learning_rate", Line(value=rate, why=source)
    warmup = min(200, steps // 10)
    yield "lr_warmup_steps", Line(value=warmup, why="OneTrainer: 200" if warmup == 200 else "a tenth of the run")


def saving_lines(request: Request, schema: Schema, trained: int) -> Iterator[tuple[str, Line]]:
    """Checkpoints, and images that show the progress if the package for them is there."""
    yield "output_dir", Line(value=str(request.output), why="the same command resumes the run that is in it")
    size = trained * _BYTES_OF_STATE / 1e9
    interval, kept = (_SAVED, 4) if request.goal == "lora" else (2 * _SAVED, 2)
    yield "checkpoint_step_interval", Line(value=interval)
    yield "checkpoints_total_limit", Line(value=kept, why=f"about {size:.2g} GB each")
    if "validation_prompt" in schema.options and (prompt := request.prompt or request.example):
        yield "validation_prompt", Line(value=[prompt], why="images of it are in the folder `samples` of the run")
        yield "validation_step_interval", Line(value=_SAVED)


def sections(request: Request, schema: Schema, resolution: int, launch: Mapping[str, Line], trained: int) -> Sections:
    """All lines of a file; `launch` are those that the planner has chosen. `trained` counts the parameters that train."""
    return {
        "Model": dict(model_lines(request)),
        "Data": dict(data_lines(request, resolution)),
        "Memory and speed, chosen by the planner": dict(launch),
        "Training": dict(training_lines(request)),
        "Results": dict(saving_lines(request, schema, trained)),
    }
