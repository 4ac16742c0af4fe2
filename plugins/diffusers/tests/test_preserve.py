"""Preservation in real runs: data of the term on one of two ranks alone, replicas, shards, cached texts, resumes."""

import json
from math import isclose

import pytest
import tiny

from support.images import images_in
from support.whole import some

OPTIONS = {
    "instance_data_dir": None,
    "model_family": "flux",
    "model_type": "lora",
    "lora_rank": 4,
    "learning_rate": 5e-2,
    "preserve": "class",
    "preserve_class": "cat",
    "preserve_weight": 0.5,
    "max_train_steps": 4,
    "checkpoint_step_interval": 2,
    "validation_prompt": None,
    "validation_step_interval": None,
    "validation_num_inference_steps": None,
}
TWO = {"num_processes": 2, "train_batch_size": 2}
KINDS = {
    "one": {},
    "accumulating": {"train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "uncached": {"text_cache_disable": True},
    "replicas": TWO,
    "shards": TWO | {"fsdp_enable": True},
    "streamed": {"stream_base": True, "gradient_checkpointing": True},
    "zero3": TWO | {"deepspeed_config": json.dumps({"zero_optimization": {"stage": 3}})},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory, train):
    """start(NAME, option=value ...) -> the folder of a run. One image of eight has a trigger word, so one rank has it."""
    folder = tmp_path_factory.mktemp("preserve")
    base, entries = tiny.flux(folder / "base"), folder / "datasets.json"
    datasets = [
        {"id": "zwx", "trigger_word": "zwx", "instance_data_dir": str(images_in(folder / "zwx", 1, (16, 16)))},
        {"id": "others", "instance_data_dir": str(images_in(folder / "others", 7, (16, 16)))},
    ]
    entries.write_text(json.dumps(datasets))

    def run(name, **options):
        given = {**OPTIONS, "pretrained_model_name_or_path": base, "data_backend_config": entries, **options}
        code, output = train(folder / name, **given)
        assert code == 0, output
        return folder / name

    return run


def parts(folder) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [{**event["parts"], "loss": event["loss"]} for event in lines if event["type"] == "step"]


@pytest.fixture(scope="module")
def one(start):
    return parts(start("one"))


def test_a_term_is_a_part_of_the_loss_in_the_passes_with_its_data_alone(one):
    assert [isclose(each["loss"], each["denoising"] + each["preserve"]) for each in one] == [True] * 4
    assert one[0]["preserve"] == 0, "the adapter changes nothing yet"
    assert sum(each["preserve"] > 0 for each in one[2:]) == 1, "the image is in one step of two"


@pytest.mark.parametrize("kind", some([kind for kind in KINDS if kind != "one"], "uncached", "shards"))
def test_it_is_the_same_however_ranks_and_passes_share_the_batch(start, one, kind):
    for found, wanted in zip(parts(start(kind, **KINDS[kind])), one, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-7)


def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_losses(start):
    whole = parts(start("whole", **KINDS["accumulating"]))
    start("stopped", **KINDS["accumulating"], max_train_steps=2)
    assert parts(start("stopped", **KINDS["accumulating"])) == whole
