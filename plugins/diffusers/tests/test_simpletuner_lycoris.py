"""SimpleTuner's examples of LoKr: those of families that are here train, the others are refused for their family alone.

The table has the facts of each example: its family and what its LyCORIS settings adapt.
"""

import json
from pathlib import Path

import pytest
import tiny
from test_simpletuner_files import EVERYWHERE, OF_SOME, dry_run  # noqa: F401  # a fixture

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti_migrate.simpletuner.lycoris import adapter_kind
from support.images import images_in
from support.warm_processes import warm_processes
from support.whole import some

FULL = {"bypass_mode": True, "algo": "lokr", "multiplier": 1.0, "full_matrix": True, "linear_dim": 10000, "linear_alpha": 1}


def preset(factor, **classes):
    own = {name: {"factor": each} for name, each in classes.items()}
    return {**FULL, "factor": factor, "apply_preset": {"target_module": list(classes), "module_algo_map": own}}


ATTENTION_AND_FEED_FORWARD = preset(4, Attention=2, FeedForward=4)
WITHOUT_REFERENCES = preset(16, Attention=16)
WITHOUT_REFERENCES["apply_preset"]["exclude_name"] = ["ref_image_*"]
LARGE = {name: each for name, each in preset(12, Attention=12).items() if name != "full_matrix"}
HERE = {
    "sdxl": (tiny.sdxl, LARGE, {"loss_type": "huber"}),
    "sana": (tiny.sana, ATTENTION_AND_FEED_FORWARD, {"lora_alpha": 128, "lora_rank": 128}),
    "pixart": (tiny.pixart, ATTENTION_AND_FEED_FORWARD, {"lora_alpha": 128, "lora_rank": 128}),
    "flux2": (
        tiny.flux2,
        preset(4, Flux2Attention=2, Flux2FeedForward=4, Flux2ParallelSelfAttention=2),
        {"model_flavour": "klein-9b", "lora_alpha": 128, "lora_rank": 128},
    ),
    "cosmos": (tiny.cosmos, preset(4, Attention=25), {}),
    "bria": (tiny.bria, preset(4, BriaTransformer2DModel=25), {}),
    "longcat_image": (tiny.longcat_image, preset(16, LongCatImageTransformer2DModel=16), {"model_flavour": "final"}),
}
COSMOS3 = preset(4, Cosmos3PackedMoTAttention=25)
KANDINSKY = preset(4, Kandinsky5Attention=2, Kandinsky5FeedForward=4)
ELSEWHERE = {
    "boogu_image": (1, WITHOUT_REFERENCES),
    "stable_cascade": (1, ATTENTION_AND_FEED_FORWARD),
    "cosmos3": (14, COSMOS3),
    "kandinsky5-image": (2, KANDINSKY),
    "omnigen": (1, ATTENTION_AND_FEED_FORWARD),
    "zlab_i1": (1, preset(4, MMDiTAttention=2, SwiGLUFFN=4)),
}
"""Families that are not here, with the number of examples."""


def example(family, settings, **more):
    Path("lycoris_config.json").write_text(json.dumps(settings))
    values = {**EVERYWHERE, **OF_SOME, "model_family": family, "lora_type": "lycoris", "lycoris_config": "lycoris_config.json"}
    del values["base_model_precision"]  # whether torchao is installed is another matter
    return values | more


def test_a_t_lora_keeps_its_schedule_of_ranks():
    settings = {"algo": "tlora", "multiplier": 1.0, "linear_dim": 64, "linear_alpha": 32, "tlora_alpha": 2.0}
    found = adapter_kind("lycoris", {"lycoris_config": settings, "model_family": "sdxl"})
    assert found == {
        "lora_kind": "lora",
        "lora_dropout": 0.0,
        "lora_rank": 64,
        "lora_alpha": 32,
        "tlora_min_rank": 1,
        "tlora_alpha": 2.0,
    }


def test_these_are_all():
    assert len(HERE) + sum(number for number, _ in ELSEWHERE.values()) == 27


@pytest.mark.parametrize("family", ELSEWHERE)
def test_an_example_of_a_family_that_is_not_here_is_refused_for_it_alone(dry_run, family):  # noqa: F811
    code, shown = dry_run(example(family, ELSEWHERE[family][1]))
    (problem,) = shown["problems"]
    assert (code, family in problem["message"]) == (2, True), problem


@pytest.mark.parametrize("family", some(HERE, "sdxl", "flux2"))
def test_an_example_of_a_family_that_is_here_trains(tmp_path, monkeypatch, family):
    monkeypatch.chdir(tmp_path)
    make, settings, more = HERE[family]
    make(tmp_path / "model")
    values = {
        **example(family, settings, **more),
        "pretrained_model_name_or_path": str(tmp_path / "model"),
        "lycoris_config": str(tmp_path / "lycoris_config.json"),
        "output_dir": str(tmp_path / "run"),
        "max_train_steps": 2,
    }
    Path("config.json").write_text(json.dumps(values))
    pictures = images_in(tmp_path / "pictures", 4, (32, 32))
    words = [f"{tmp_path}/config.json", f"--instance_data_dir={pictures}", "--resolution=32", "--resolution_type=pixel"]
    words += [
        "--use_cpu",
        "--mixed_precision=no",
        "--optimizer=adamw",
        "--checkpoint_step_interval=2",
        "--validation_step_interval=0",
    ]
    code, output = warm_processes().train(words, {"HF_HOME": str(tmp_path / "hf")})
    assert code == 0, output
    saved = TensorFiles(sorted((tmp_path / "run" / "checkpoints" / "step-00000002" / "model").glob("*.safetensors")))
    assert {name.rpartition(".lokr_")[2] for name in saved.tensors} == {"w1.default", "w2.default"}
