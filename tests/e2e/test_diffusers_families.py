"""Families of diffusers train as a user starts them: sharded, offloaded, and after a resume with shared tokens.

The pipelines are tiny ones with random weights; what several processes make is compared with what one makes.
"""

import pytest
import tiny
from PIL import Image, ImageChops

PROMPTS = ["circle number 1", "circle number 2"]
OPTIONS = {
    "max_train_steps": 4,
    "train_batch_size": 4,
    "tokenizer_max_length": 32,
    "validation_step_interval": 4,
    "validation_prompt": PROMPTS,
    "validation_num_inference_steps": 2,
    "allow_dataset_oversubscription": True,
}
SHARDED = {"fsdp_enable": True, "num_processes": 2, "use_cpu": True}
ON_CPU = {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    root = tmp_path_factory.mktemp("families")

    def go(kind, **options):
        family = kind.split()[0]
        if not (root / family).exists():
            getattr(tiny, family)(root / family)
        named = {"model_family": family, "pretrained_model_name_or_path": root / family}
        run = train(root / kind.replace(" ", "-"), probe=False, **OPTIONS | named | options)
        assert run.code == 0, run.output
        return run

    halves = SHARDED | {"train_batch_size": 2}
    go("flux resumed", **halves, max_train_steps=2, validation_prompt=[])
    return {
        "flux": go("flux alone"),
        "flux resumed": go("flux resumed", **SHARDED, context_parallel_size=2, variables=ON_CPU),
        "sd3": go("sd3 alone"),
        "sd3 offloaded": go("sd3 offloaded", **halves, fsdp_cpu_offload=True),
    }


SEVERAL = ["flux resumed", "sd3 offloaded"]
"""Two steps on each rank's own pictures, then two in which both ranks share the tokens of all; and a model kept on the CPU."""


@pytest.mark.parametrize("kind", SEVERAL)
def test_losses_are_those_of_one_process(runs, kind):
    assert runs[kind].losses == pytest.approx(runs[kind.split()[0]].losses, rel=1e-4)


def test_a_resumed_run_encodes_nothing_again(runs):
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
