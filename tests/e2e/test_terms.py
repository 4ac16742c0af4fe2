"""Sliders and preferences over ranks: what one process trains, whoever holds the pairs."""

import json
import shutil

import pytest
import tiny
import torch
from PIL import Image, ImageOps

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from support.whole import some

STEPS = 3
OPTIONS = {
    "model_family": "sd3",
    "model_type": "lora",
    "lora_rank": 4,
    "mixed_precision": "no",
    "resolution": 16,
    "resolution_type": "pixel",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # else Adam makes a whole step of a rounding error
    "tokenizer_max_length": 32,
    "vae_cache_disable": True,
    "max_train_steps": STEPS,
    "instance_data_dir": None,
    "allow_dataset_oversubscription": True,
    "probe": False,
}
ZERO = {"deepspeed_config": json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})}
SHARDED = {"fsdp_enable": True, "fsdp_activation_checkpointing": True}
WAYS = {
    "one": {"train_batch_size": 6, "use_cpu": True},
    "ddp": {"train_batch_size": 2, "num_processes": 3, "use_cpu": True},
    "fsdp": {"train_batch_size": 3, "num_processes": 2, "use_cpu": True, **SHARDED},
    "accumulated": {"train_batch_size": 1, "gradient_accumulation_steps": 3, "num_processes": 2, "use_cpu": True, **SHARDED},
    "zero": {"train_batch_size": 3, "num_processes": 2, "use_cpu": True, **ZERO},
    "shared": {"train_batch_size": 6, "num_processes": 2, "use_cpu": True, "context_parallel_size": 2, "fsdp_enable": True},
}
KINDS = {
    "dpo": {"dpo_beta": 100},
    "images": {"slider": "images"},
    "prompts": {"slider": "prompts", "slider_positive": "a large circle", "slider_negative": "a small circle"},
}
EVERY = [
    *(("dpo", way) for way in ("ddp", "fsdp", "zero")),
    *(("images", way) for way in ("accumulated", "zero", "shared")),
    ("prompts", "ddp"),
]
TRAINED = some(EVERY, ("dpo", "zero"), ("images", "accumulated"), ("images", "shared"), ("prompts", "ddp"))


def whole(run) -> dict[str, torch.Tensor]:
    """Whole tensors of the adapter after the last step, whoever wrote it."""
    files = TensorFiles(sorted((run.directory / "checkpoints" / f"step-{STEPS:08d}" / "model").glob("*.safetensors")))
    return {name: torch.frombuffer(bytearray(files.read(name)), dtype=torch.float32) for name in files.tensors}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terms")
    tiny.sd3(folder / "base")
    return folder


@pytest.fixture(scope="module")
def datasets(root, pictures):
    """Files of datasets by kind: of preferences, a quarter of the images has a worse one, so some ranks have none in a step."""
    (root / "others").mkdir()
    (root / "few").mkdir()
    for path in sorted(pictures.glob("*.png")):
        with Image.open(path) as image:
            ImageOps.invert(image).save(root / "others" / path.name)
        if int(path.stem) % 4 == 0:
            for one in (path, path.with_suffix(".txt")):
                shutil.copy(one, root / "few")
    shape = {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    whole = {"id": "all", "instance_data_dir": str(pictures), **shape}
    few = {"id": "few", "instance_data_dir": str(root / "few"), "rejected_path": str(root / "others"), **shape}
    entries = {
        "dpo": [whole, few],
        "images": [{**whole, "slider_counterpart_path": str(root / "others")}],
        "prompts": [whole],
    }
    for kind, found in entries.items():
        (root / f"{kind}.json").write_text(json.dumps(found))
    return {kind: root / f"{kind}.json" for kind in entries}


@pytest.fixture(scope="module")
def given(root, datasets):
    """The options of a kind of run."""

    def options(kind, way):
        named = {"pretrained_model_name_or_path": root / "base", "cache_dir": root / "cache"}
        found = {**OPTIONS, **named, **KINDS[kind], **WAYS[way], "data_backend_config": datasets[kind]}
        return found | ({"variables": {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}} if way == "shared" else {})

    return options


@pytest.fixture(scope="module")
def runs(root, train, given):
    found = {}
    for kind, way in (*((kind, "one") for kind in KINDS), *TRAINED):
        found[kind, way] = train(root / f"{kind}-{way}", **given(kind, way))
        assert found[kind, way].code == 0, found[kind, way].output
    return found


@pytest.mark.parametrize(("kind", "way"), TRAINED)
def test_losses_and_adapters_are_those_of_one_process(runs, kind, way):
    alone, found = runs[kind, "one"], runs[kind, way]
    assert found.losses == pytest.approx(alone.losses, rel=2e-5)
    expected, tensors = whole(alone), whole(found)
    assert expected.keys() == tensors.keys()
    assert max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items()) < 2e-5
