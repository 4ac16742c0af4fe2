"""The examples of families of diffusers, on tiny pipelines: sharded, offloaded, with an adapter, resumed with shared tokens.

What several processes make is compared with what one makes.
"""

import shutil
from pathlib import Path

import pytest
import tiny
from PIL import Image, ImageChops

EXAMPLES = Path(__file__).parents[2] / "examples"
FLUX, SD3, PIXART = "flux-fsdp2-context", "sd3-fsdp2-offload", "pixart-lora"
PROMPTS = ["circle number 1", "circle number 2"]
SMALL = {
    "use_cpu": True,
    "mixed_precision": "no",
    "resolution": 16,
    "resolution_type": "pixel",
    "learning_rate": 1e-3,
    "tokenizer_max_length": 32,
    "train_batch_size": 4,
    "max_train_steps": 4,
    "checkpoint_step_interval": 2,
    "validation_step_interval": 4,
    "validation_prompt": PROMPTS,
    "validation_num_inference_steps": 2,
    "allow_dataset_oversubscription": True,
    "without": "plots",
}
ALONE = {"num_processes": 1, "fsdp_enable": False}
ON_CPU = {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    root = tmp_path_factory.mktemp("families")

    def go(example, kind="", **options):
        family = example.partition("-")[0]
        if not (root / family).exists():
            getattr(tiny, family)(root / family)
        named = {
            "pretrained_model_name_or_path": root / family,
            "cache_dir": root / "cache",
            "config": EXAMPLES / f"{example}.toml",
        }
        run = train(root / f"{example}{kind}", **SMALL | named | options, probe=False)
        assert run.code == 0, run.output
        return run

    alone = go(FLUX, " alone", context_parallel_size=1, **ALONE)
    shutil.copytree(alone.directory / "checkpoints" / "step-00000002", root / FLUX / "checkpoints" / "step-00000002")
    return {
        "flux": alone,
        "flux resumed": go(FLUX, num_processes=2, variables=ON_CPU),
        "sd3": go(SD3, " alone", fsdp_cpu_offload=False, **ALONE),
        "sd3 offloaded": go(SD3, train_batch_size=2),
        "pixart": go(PIXART),
    }


SEVERAL = ["flux resumed", "sd3 offloaded"]
"""Two steps of one process, then two in which two ranks share the tokens of every picture; and a model kept on the CPU."""


@pytest.mark.parametrize("kind", SEVERAL)
def test_losses_are_those_of_one_process(runs, kind):
    found = runs[kind].losses
    assert found == pytest.approx(runs[kind.split()[0]].losses[-len(found) :], rel=1e-4)


def test_what_another_run_has_encoded_is_not_encoded_again(runs):
    said = {kind: "smalti: encoding 24 of 24 latents" in runs[kind].output for kind in ("flux", "flux resumed")}
    assert said == {"flux": True, "flux resumed": False}


@pytest.mark.parametrize("kind", SEVERAL)
def test_pictures_of_the_trained_model_are_those_of_one_process(runs, kind):
    folders = [runs[run].directory / "samples" / "00000004" for run in (kind.split()[0], kind)]
    names = sorted(path.name for path in folders[1].glob("0*.png"))
    assert len(names) == len(PROMPTS)
    for name in names:
        pair = [Image.open(folder / name) for folder in folders]
        assert max(high for _, high in ImageChops.difference(*pair).getextrema()) <= 2


def test_a_run_goes_on_where_tokens_were_not_shared(runs):
    assert [event["step"] for event in runs["flux resumed"].events("step")] == [3, 4]


def test_the_adapter_of_the_example_is_all_that_is_trained(runs):
    names = runs["pixart"].tensors(4, "model")
    assert {".lora_" in name for name in names} == {True}
