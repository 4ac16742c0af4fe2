"""A small data set, and rehearsals of runs on it, each in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from accelerators.rehearsal import encoded, rehearse
from support.forked_ranks import forked_processes
from support.images import images_in

PIPELINES = Path(__file__).parents[2] / "plugins/diffusers/tests/tiny.py"
TOY = {"model_family": "toy", "toy_width": 32, "toy_depth": 2, "toy_heads": 2}
COMMON = {
    "resolution": 16,
    "resolution_type": "pixel",
    "mixed_precision": "bf16",
    "learning_rate": 1e-3,
    "train_batch_size": 1,
    "max_train_steps": 10,
    "validation_prompt": "a circle",
    "validation_num_inference_steps": 2,
    "checkpoint_step_interval": 0,
    "without": "plots",
}
PIPELINE_MODULES = {
    "anima": "diffusers.modular_pipelines.anima",
    "auraflow": "diffusers.pipelines.aura_flow.pipeline_aura_flow",
    "bria": "diffusers.pipelines.bria.pipeline_bria",
    "chroma": "diffusers.pipelines.chroma.pipeline_chroma",
    "cosmos": "diffusers.pipelines.cosmos.pipeline_cosmos2_text2image",
    "ernie": "diffusers.pipelines.ernie_image.pipeline_ernie_image",
    "flux": "diffusers.pipelines.flux.pipeline_flux",
    "flux2": "diffusers.pipelines.flux2.pipeline_flux2_klein",
    "hidream": "diffusers.pipelines.hidream_image.pipeline_hidream_image",
    "ideogram": "diffusers.pipelines.ideogram4.pipeline_ideogram4",
    "krea2": "diffusers.pipelines.krea2.pipeline_krea2",
    "longcat_image": "diffusers.pipelines.longcat_image.pipeline_longcat_image",
    "lumina2": "diffusers.pipelines.lumina2.pipeline_lumina2",
    "ovis_image": "diffusers.pipelines.ovis_image.pipeline_ovis_image",
    "pixart": "diffusers.pipelines.pixart_alpha.pipeline_pixart_sigma",
    "qwen_image": "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "qwen_image21": "diffusers.pipelines.qwenimage21.pipeline_qwenimage21",
    "sana": "diffusers.pipelines.sana.pipeline_sana",
    "sd3": "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "sdxl": "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "z_image": "diffusers.pipelines.z_image.pipeline_z_image",
}
"""Of what each family of diffusers imports, what takes longest."""


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Thirty-two squares with captions: two batches for 16 ranks."""
    return images_in(tmp_path_factory.mktemp("images"), 32, caption="a square of shade {}")


@pytest.fixture(scope="session")
def rehearsed(images, tmp_path_factory):
    """rehearsed(*flags, rank=1, ranks=8, saves=True, samples=True, **options) -> what `rehearse` saw of such a run.

    Of the toy family, if they name no other. `module` runs in the process that brings the devices.
    """

    def run(*flags: str, module: str = "accelerators", rank: int = 1, ranks: int = 8, saves=True, samples=True, **options):
        directory = tmp_path_factory.mktemp("run") / "run"
        values = {**COMMON, "instance_data_dir": images, "output_dir": directory, "num_processes": ranks}
        words = as_words(values | (options if "model_family" in options else TOY | options), flags)
        imports = [PIPELINE_MODULES[options["model_family"]]] if "model_family" in options else ()
        with forked_processes(ranks=1, group=False, module=module, imports=imports) as process:
            return process.run(rehearse, words, rank=rank, ranks=ranks, saves=saves, samples=samples)[0]

    return run


@pytest.fixture(scope="session")
def pipeline(images, tmp_path_factory):
    """pipeline(name, **options) -> the options of a family of diffusers at its tiniest, and these options.

    Images and captions were encoded before.
    """
    known = {}

    def make(name: str, **options: object) -> dict[str, object]:
        key = (name, *options.items())
        if key not in known:
            folder = tmp_path_factory.mktemp(name)
            known[key] = options | {
                "model_family": name,
                "pretrained_model_name_or_path": folder / "pipeline",
                "cache_dir": folder / "cache",
                "tokenizer_max_length": 32,
                "vae_dtype": "fp32",
                "text_encoder_dtype": "fp32",
            }
            values = {**COMMON, **known[key], "instance_data_dir": images, "output_dir": folder / "run"}
            imports = [PIPELINE_MODULES[name]]
            with forked_processes(ranks=1, group=False, module="accelerators", imports=imports) as process:
                process.run(encoded, as_words(values), PIPELINES, name, folder / "pipeline")
        return known[key]

    return make


@pytest.fixture(scope="module")
def seen(request, rehearsed):
    """What was seen of a run of the module's `RUNS`, by name; each is rehearsed once.

    `family` is one of diffusers'. Its saves are those of any model, which the toy family shows in less time.
    """
    options = dict(request.module.RUNS[request.param])
    if "family" in options:
        options |= {"saves": False, **request.getfixturevalue("pipeline")(options.pop("family"))}
    return rehearsed(*options.pop("flags", ()), **options)


def as_words(values: dict[str, object], flags: Sequence[str] = ()) -> list[str]:
    return [*(f"--{name}={value}" for name, value in values.items()), *(f"--{flag}" for flag in flags)]
